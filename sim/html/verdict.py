"""The verdict: one sentence with numbers, what it leaves out, and what a reader must be warned of."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from sim.html.contest import TIE, Contest, contests
from sim.html.rivals import lossy_note, oracle_note
from sim.html.words import all_of, bound_by, listed, number_of, percent, setting_words, span, times
from sim.labels import Row, value
from sim.league import geometric, kind_of, setting_fields, usual_baseline
from sim.settings import did_you_mean
from sim.types import ConfigError

_CLASS_WORDS = {
    "lossless": "lossless policies",
    "lossy": "lossy policies, which change the model's answer",
    "oracle": "oracles, which know the future",
}
_ASIDES = {"oracle": ", which knows the future,", "lossy": ", which changes the model's answer,"}
_RUNS = {"lossless": "lossless one", "lossy": "lossy one", "oracle": "oracle"}
_MOST_LOST = 5


@dataclass(frozen=True, slots=True)
class Verdict:
    """A sentence, and further ones that a reader of it must know."""

    sentence: str
    notes: tuple[str, ...] = ()


def verdict_of(rows: Sequence[Row], baseline: str | None = None) -> Verdict:
    """Return what the rows say.

    Parameters
    ----------
    rows
        Summary rows, at least one.
    baseline
        The policy to compare with; None: the one that the runs name, or the usual one.

    Raises ConfigError for a baseline that did not run.
    """
    played = contests(rows)
    if baseline is not None:
        known = sorted({name for contest in played.values() for name in contest.names})
        if baseline not in known:
            rule = f"must be a policy that ran ({', '.join(known)})"
            raise ConfigError(f"--baseline {baseline}: {rule}{did_you_mean(baseline, known)}")
    if not played:
        served = "the run" if len(rows) == 1 else all_of(len(rows), "runs")
        return Verdict(
            f"Nothing could be served: {served} refused every request, as none fits in the "
            "memory that the KV cache may take."
        )
    main = next(iter(played.values()))
    with_speed = [row for row in rows if row["tokens_per_s"]]
    if len(with_speed) == 1:
        return Verdict(_one_run(with_speed[0]), (*_one_notes(with_speed[0]), *_refused(rows)))
    notes = []
    if len(main.names) == 1:
        sentence = _one_policy(main, sum(len(c.names) for c in played.values()))
    elif len(main.compared) > 1 and main.shared:
        sentence = _winner(main, _baseline(rows, main, baseline))
        notes += [*_lost(main), *_partial(main), *_tie_rule(main)]
    else:
        sentence = _points(rows, main)
    notes += [lossy_note(played), oracle_note(played), *_refused(rows)]
    return Verdict(sentence, tuple(note for note in notes if note))


def _baseline(rows: Sequence[Row], main: Contest, asked: str | None) -> str | None:
    """Return whom the winner is compared with; None where nobody fit for that ran in its settings."""
    ran = list(dict.fromkeys(name for setting in main.shared for name in setting.rows))
    wanted = asked or rows[0].get("baseline")
    return wanted if wanted in ran else usual_baseline(ran)


# -- one run, or one policy ------------------------------------------------------------------------


def _one_run(row: Row) -> str:
    kind = kind_of(row)
    tpot = row.get("tpot_ns_p50")
    pace = "" if tpot is None else f" (TPOT p50 {tpot / 1e6:.2f} ms)"
    bound = bound_by([row])
    return (
        f"{row['policy']}{_ASIDES.get(kind, '')} makes {row['tokens_per_s']:.1f} tokens/s{pace} for "
        f"{row['model']} on {row['machine']} with {percent(row['cache_ratio'])} of the experts in the "
        f"device's memory{'; it is ' + bound if bound else ''}."
    )


def _one_notes(row: Row) -> Iterator[str]:
    """Tell how far the best cache is, and what would bring most."""
    if row.get("belady_hit_rate") is not None and row.get("hit_rate") is not None:
        yield (
            f"It finds {percent(row['hit_rate'])} of the experts where they compute; the best that any cache "
            f"of this size could find is {percent(row['belady_hit_rate'])}."
        )
    tried = [one for one in row.get("what_if") or [] if one["tokens_per_s_change"]]
    if tried and tried[0]["tokens_per_s_change"] > 0:
        told = [f"{one['name']} ({100 * one['tokens_per_s_change']:+.1f}%)" for one in tried[:3]]
        yield f"Of what was tried in its place, these bring most speed: {listed(told)}."


def _one_policy(main: Contest, num_policies: int) -> str:
    name = main.names[0]
    settings = sorted(main.settings, key=lambda setting: setting.speed(name))
    slowest, fastest = settings[0], settings[-1]
    of = {"lossless": "the only lossless policy", "lossy": "the only lossy policy"}
    who = f"{name}, {of[main.kind]}," if num_policies > 1 and main.kind in of else name
    who += _ASIDES.get(main.kind, "") if who == name else ""
    bound = bound_by([setting.rows[name] for setting in settings])
    if len(settings) == 1:
        return f"{who} makes {fastest.speed(name):.1f} tokens/s; it is {bound}."
    ratio = times(fastest.speed(name) / slowest.speed(name))
    return (
        f"{who} makes {slowest.speed(name):.1f} tokens/s ({slowest.words}) to {fastest.speed(name):.1f} "
        f"({fastest.words}), which is {ratio}; it is {bound}."
    )


def _points(rows: Sequence[Row], main: Contest) -> str:
    best = max(
        (row for row in rows if row["tokens_per_s"] and kind_of(row) == main.kind),
        key=lambda row: row["tokens_per_s"],
    )
    fields = setting_fields(rows)
    values = [*(value(best, field) for field in fields), best["cache_ratio"]]
    return (
        f"The fastest {_RUNS[main.kind]} of {number_of(len(rows), 'run')} is {best['policy']} at "
        f"{setting_words(fields, values)}: {best['tokens_per_s']:.1f} tokens/s; it is "
        f"{bound_by([best])}; policies are not compared, for {_apart(main)}."
    )


def _apart(main: Contest) -> str:
    """Say why no winner can be named."""
    if any(len(setting.of(main.kind)) > 1 for setting in main.settings):
        return "no setting has all of them (the league compares those that share settings with the baseline)"
    return "no two of a class ran in the same settings"


# -- several policies ------------------------------------------------------------------------------


def _winner(main: Contest, baseline: str | None) -> str:
    best = main.leaders[0]
    if len(main.leaders) > 1:
        head, whose = _tie(main), f"{best} is"
    else:
        mark = ", the baseline," if best == baseline else ""
        of = f"{len(main.compared)} {_CLASS_WORDS[main.kind]}"
        head, whose = f"{best}{mark} is the fastest of {of}", "it is"
    bound = bound_by([setting.rows[best] for setting in main.shared])
    holds = _holds(main)
    comma = "," if holds and "," in _CLASS_WORDS[main.kind] else ""
    return f"{head}{comma}{holds}: {_figures(main, best, baseline)}; {whose} {bound}."


def _tie(main: Contest) -> str:
    """Say who ties, and how closely."""
    names, what = main.leaders, _CLASS_WORDS[main.kind]
    speeds = [{setting.speed(name) for name in names} for setting in main.shared]
    close = "exactly" if all(len(one) == 1 for one in speeds) else f"within {TIE:.0%}"
    if len(names) < len(main.compared):
        return f"{listed(names)} tie ({close}) as the fastest of {len(main.compared)} {what}"
    comma = "," if "," in what else ""
    return f"{all_of(len(names), what).capitalize()}{comma} tie ({close})"


def _holds(main: Contest) -> str:
    """Say in how many settings the lead holds."""
    count, (alone, tied) = len(main.shared), _counts(main)
    lost = count - alone - tied
    if count == 1:
        return ""
    if len(main.leaders) > 1:
        return f" in the mean of {count} settings"
    if not lost:
        return f" in {all_of(count, 'settings')}" + (f", tied in {tied} of them" if tied else "")
    told = f" in the mean of {count} settings, and in {alone} of them"
    return told + (f" (tied in {tied} more, slower in {lost})" if tied else f" (slower in {lost})")


def _counts(main: Contest) -> tuple[int, int]:
    """Return in how many settings the leader leads alone, and in how many with others."""
    best = main.leaders[0]
    fastest = [setting.fastest(main.compared) for setting in main.shared]
    alone = sum(names == [best] for names in fastest)
    return alone, sum(best in names for names in fastest) - alone


def _figures(main: Contest, best: str, baseline: str | None) -> str:
    settings = main.shared
    speeds = [setting.speed(best) for setting in settings]
    parts = [f"{span(speeds, lambda speed: f'{speed:.1f}')} tokens/s"]
    if baseline is not None and baseline != best:
        parts.append(_over(main.ratios(best, baseline), f"{baseline}'s", len(settings)))
    second = next((name for name in main.ranking if name not in main.leaders), None)
    if second is not None and second != baseline:
        parts.append(_over(main.ratios(best, second), f"the next, {second}'s", len(settings)))
    return listed(parts)


def _over(ratios: Sequence[float], whose: str, count: int) -> str:
    found = f"{times(geometric(ratios))} {whose}"
    if len(ratios) == 1:
        return found
    reach = span(ratios, times)
    parts = [reach] if reach != times(geometric(ratios)) else []
    parts += [] if len(ratios) == count else [f"in {len(ratios)} settings"]
    return f"{found} ({', '.join(parts)})" if parts else found


# -- what the sentence leaves out ------------------------------------------------------------------


def _lost(main: Contest) -> list[str]:
    """Tell who is faster than the leader, and where, the greatest lead first."""
    best = main.leaders[0]
    lost = [
        (setting.speed(first[0]) / setting.speed(best), first, setting)
        for setting in main.shared
        if best not in (first := setting.fastest(main.compared))
    ]
    lost.sort(key=lambda one: -one[0])
    told = [f"{listed(n)} at {s.words} ({times(ratio)})" for ratio, n, s in lost[:_MOST_LOST]]
    more = f"; and in {len(lost) - _MOST_LOST} more settings" if len(lost) > _MOST_LOST else ""
    return [f"Faster than {best}: {'; '.join(told)}{more}."] if lost else []


def _partial(main: Contest) -> list[str]:
    """Tell where comparison was not possible."""
    notes = []
    if len(main.shared) < len(main.settings):
        notes.append(
            f"Compared are the {len(main.shared)} of {len(main.settings)} settings in which "
            f"{listed(main.compared)} all ran."
        )
    left_out = [name for name in main.names if name not in main.compared]
    if left_out:
        notes.append(f"Not compared, as they ran in fewer settings: {listed(left_out)}.")
    return notes


def _tie_rule(main: Contest) -> list[str]:
    if not any(len(setting.fastest(main.compared)) > 1 for setting in main.shared):
        return []
    return [
        f"Speeds within {TIE:.0%} of each other are called a tie: a simulated run repeats exactly, but no "
        "prediction is that exact."
    ]


def _refused(rows: Sequence[Row]) -> tuple[str, ...]:
    count = sum(not row["tokens_per_s"] for row in rows)
    told = f"{count} of {len(rows)} runs refused every request and have no speed."
    return (told,) if count else ()
