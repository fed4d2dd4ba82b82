"""Words and sentence templates of the generated problems."""

from __future__ import annotations

# ruff: noqa: SIM905 - lists of one word a line would read worse
NAMES = (
    "Ana Ben Cleo Dan Eva Finn Gwen Hugo Iris Jack Kim Leo Mia Ned Olga Paul Quin Rosa Sam Tess "
    "Uma Vic Wanda Xena Yan Zoe Abel Bella Carl Dora Emil Faye Gus Hana Ivan Jane Kurt Lola "
    "Mark Nina"
).split()

ITEMS = (
    "apples beads cards coins books pens stamps shells marbles buttons eggs plums stickers "
    "stones keys cups pears nuts hats bolts ribbons candles cookies tickets balls bricks leaves "
    "lemons maps medals nails photos rings seeds spoons toys tulips wheels"
).split()

PLACES = (
    "at the market",
    "in the garden",
    "at school",
    "on the beach",
    "at home",
    "in the attic",
    "by the river",
    "at the fair",
    "in the park",
    "at the club",
)
OPENINGS = (
    "{name} has {n} {items} {place}.",
    "{place_cap}, {name} has {n} {items}.",
    "{name} starts with {n} {items}.",
    "One day {name} counts {n} {items} {place}.",
    "There are {n} {items} in the bag of {name}.",
)
BOX_OPENINGS = (
    "{name} has {n} boxes {place}. Each box holds {m} {items}.",
    "{place_cap}, {name} fills {n} bags with {m} {items} each.",
    "{name} buys {n} packs. There are {m} {items} in each pack.",
    "{name} makes {n} rows of {m} {items} {place}.",
)
GAINS = (
    "finds {n} more",
    "buys {n} more",
    "gets {n} from {friend}",
    "wins {n} more",
    "picks up {n} more",
    "is given {n} by {friend}",
    "adds {n} more",
)
LOSSES = (
    "loses {n}",
    "gives {n} to {friend}",
    "sells {n} of them",
    "drops {n} of them",
    "throws {n} away",
    "lends {n} to {friend}",
    "leaves {n} behind",
)
LINKS = ("Then {name} {act}.", "Later {name} {act}.", "{name} {act}.", "Next, {name} {act}.")
SHARES = (
    "{name} shares them equally among {n} friends and looks at one share.",
    "The {items} are split into {n} equal piles, and {name} keeps one pile.",
    "{name} divides them into {n} equal parts and takes one part.",
)
ENDINGS = (
    "How many {items} does {name} have now?",
    "How many {items} are there at the end?",
    "What is the number of {items} now?",
    "How many {items} is that in the end?",
)
COMPARE_OPENINGS = ("{name} has {n} {items} {place}.", "{place_cap}, {name} owns {n} {items}.")
COMPARE_MORE = ("{next} has {n} more than {name}.", "{next} has {n} more {items} than {name}.")
COMPARE_LESS = ("{next} has {n} fewer than {name}.", "{next} has {n} fewer {items} than {name}.")
COMPARE_ENDINGS = ("How many {items} does {name} have?", "How many {items} belong to {name}?")

RESTATES = (
    "Given: {name} starts with {n} {items}, {facts}.",
    "We know: at first {n} {items}, {facts}.",
    "Facts: {name} counts {n} {items}, {facts}.",
)
FACTS = {
    "+": ("then {n} more", "gains {n}"),
    "-": ("then {n} fewer", "loses {n}"),
    "*": ("times {n} in each", "with {n} in each"),
    "/": ("shared by {n}", "split in {n} parts"),
}
PLANS = (
    "Plan: start at {n}, {deeds}.",
    "To do: take {n}, {deeds}, and check.",
    "Idea: from {n} we {deeds}.",
)
DEEDS = {"+": "add {n}", "-": "take away {n}", "*": "multiply by {n}", "/": "divide by {n}"}
STEPS = (
    "Step {i}: {deed}, so {sum}.",
    "Step {i}: {sum}.",
    "Step {i}: now {deed}: {sum}.",
)
HEDGES = ("maybe", "perhaps", "I guess")
REPAIRS = (
    "Wait, {left} is not {wrong}. Redo it: {sum}.",
    "Wait, that looks wrong. Again with care: {sum}.",
    "Wait, {wrong} cannot be right. Compute {left} once more: {sum}.",
)
CHECKS = (
    "Check: go back from {n}: {sums}. This is the start.",
    "Verify: undo it all from {n}: {sums}. It fits.",
    "Test: from {n} in reverse: {sums}. Good.",
)
ANSWERS = (
    "Answer: {n} {items}.",
    "Result: {n} {items}.",
    "Final: {name} has {n} {items}.",
)
