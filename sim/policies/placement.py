"""Where a missing expert runs: in situ on the CPU, or on the GPU after a load.

What all rules here share is a price list, :class:`Prices`; the rules that weigh a whole layer's experts
against each other are in hybrid.py, those that split misses by a share in share.py.
"""

from __future__ import annotations

from collections.abc import Sequence

from sim.policies.base import PlacementPolicy
from sim.types import ExpertWork, Service, View

_EXACT_EXPERTS = 12
"""Missing experts of unequal token counts up to which FiddlerMax searches all ways to divide them."""


class Prices:
    """What one missing expert costs on either side, in nanoseconds.

    Parameters
    ----------
    cpu_token_ns, load_ns
        Constants of a published program: so much on the CPU a token, and so much to load, computing on
        the GPU being free. Both 0: what ``view.costs`` says, the GPU's computation included.
    """

    def __init__(self, cpu_token_ns: int = 0, load_ns: int = 0) -> None:
        for name, value in (("cpu_token_ns", cpu_token_ns), ("load_ns", load_ns)):
            if value < 0:
                raise ValueError(f"{name} = {value}: must be >= 0")
        if (cpu_token_ns > 0) != (load_ns > 0):
            raise ValueError(
                f"load_ns = {load_ns}: must be 0 if cpu_token_ns is, and above 0 if cpu_token_ns is "
                f"(it is {cpu_token_ns})"
            )
        self._constants = (cpu_token_ns, load_ns)
        self._known: dict[tuple[int, int], tuple[int, int]] = {}

    def of(self, key: int, num_tokens: int, view: View) -> tuple[int, int]:
        """Return (on the CPU, loaded and computed on the GPU) for an expert that is not on the GPU."""
        bank = key // view.keys.num_experts
        found = self._known.get((bank, num_tokens))
        if found is None:
            found = self._known[bank, num_tokens] = self._work_out(bank, num_tokens, view)
        return found

    def _work_out(self, bank: int, num_tokens: int, view: View) -> tuple[int, int]:
        cpu_token_ns, load_ns = self._constants
        if cpu_token_ns:
            return num_tokens * cpu_token_ns, load_ns
        costs = view.costs
        gpu_ns = costs.load_ns(bank) + costs.expert_gpu_ns(bank, num_tokens, view.packed)
        return costs.expert_cpu_ns(bank, num_tokens), gpu_ns


class InSituCPU(PlacementPolicy):
    """Run a missing expert on the CPU when that costs less than loading it (Fiddler, arXiv 2402.07033).

    Each missing expert is judged alone: CPU iff cpu_ns(tokens) < load_ns + gpu_ns(tokens), which is
    what minimising the *sum* over devices comes to (Fiddler's code; its comment says the maximum, for
    which see FiddlerMax). The handover a layer costs is left out, as in Fiddler's rule. It is SAEM's
    in-situ rule (arXiv 2608.21614) as well, where the cache admits nothing.

    Parameters
    ----------
    keep
        True: what is not run on the CPU is offered to the cache. False: it is loaded for this use alone.
    cpu_token_ns, load_ns
        Constants instead of ``view.costs``: see Prices. Fiddler's are 7 ms a token and 70 ms
        (efeslab/fiddler, Mixtral-8x7B in bf16).
    """

    def __init__(self, keep: bool = True, cpu_token_ns: int = 0, load_ns: int = 0) -> None:
        self._prices = Prices(cpu_token_ns, load_ns)
        self._on_gpu = Service.LOAD if keep else Service.BYPASS

    def place(self, work: Sequence[ExpertWork], view: View) -> Sequence[Service]:
        """Return CPU, or LOAD (BYPASS where nothing is kept), for each missing expert."""
        price, on_gpu = self._prices.of, self._on_gpu
        services = []
        for key, tokens, _ in work:
            cpu_ns, gpu_ns = price(key, tokens, view)
            services.append(Service.CPU if cpu_ns < gpu_ns else on_gpu)
        return services


class FiddlerMax(PlacementPolicy):
    """Divide a layer's missing experts so that the busier of CPU and GPU ends soonest.

    What Fiddler's comment promises, min max(sum on the CPU, sum on the GPU), and its code does not do
    (efeslab/fiddler; the code is InSituCPU). A resident expert costs the GPU nothing, as there. The
    division is the best of all while the missing experts serve equally many tokens each, while their
    price on the GPU is the same, or while there are at most 12; else it is the best of those that give
    the GPU the experts with the most CPU work. What is loaded is not kept.

    Parameters
    ----------
    cpu_token_ns, load_ns
        Constants instead of ``view.costs``: see Prices.
    """

    def __init__(self, cpu_token_ns: int = 0, load_ns: int = 0) -> None:
        self._prices = Prices(cpu_token_ns, load_ns)
        self._alike: dict[tuple[tuple[int, int], ...], Sequence[Service]] = {}

    def place(self, work: Sequence[ExpertWork], view: View) -> Sequence[Service]:
        """Return CPU or BYPASS for each missing expert."""
        price, tokens = self._prices.of, work[0][1] if work else 0
        prices = [price(key, num_tokens, view) for key, num_tokens, _ in work]
        if any(item[1] != tokens for item in work):
            on_cpu = least_maximum(prices)
            return [Service.CPU if cpu else Service.BYPASS for cpu in on_cpu]
        alike = tuple(prices)  # one token's experts: the same few cases again and again
        if alike not in self._alike:
            on_cpu = least_maximum(prices)
            self._alike[alike] = [Service.CPU if cpu else Service.BYPASS for cpu in on_cpu]
        return self._alike[alike]


class FewTokensOnCPU(PlacementPolicy):
    """Run a missing expert that few tokens use on the CPU, load the others for this use alone.

    SAEM's wording (arXiv 2608.21614); the number is a RECONSTRUCTION, for none is public.

    Parameters
    ----------
    max_tokens
        The most tokens that count as few.
    """

    def __init__(self, max_tokens: int = 1) -> None:
        if max_tokens < 0:
            raise ValueError(f"max_tokens = {max_tokens}: must be >= 0")
        self.max_tokens = max_tokens

    def place(self, work: Sequence[ExpertWork], view: View) -> Sequence[Service]:
        """Return CPU or BYPASS for each missing expert."""
        most = self.max_tokens
        return [Service.CPU if tokens <= most else Service.BYPASS for _, tokens, _ in work]


class BypassMisses(PlacementPolicy):
    """Load every missing expert for this use alone, whatever the cache would admit."""

    def place(self, work: Sequence[ExpertWork], view: View) -> Sequence[Service]:
        """Return BYPASS for each missing expert."""
        return [Service.BYPASS] * len(work)


# -- the division ----------------------------------------------------------------------------------


def least_maximum(prices: Sequence[tuple[int, int]]) -> list[bool]:
    """Return which experts, priced (CPU, GPU), run on the CPU so that the larger sum is least.

    See FiddlerMax for when the answer is exact.
    """
    order = sorted(range(len(prices)), key=lambda place: (-prices[place][0], place))
    num_on_gpu, least_ns = _best_prefix([prices[place] for place in order])
    chosen = [False] * len(prices)
    for place in order[num_on_gpu:]:
        chosen[place] = True
    same_gpu = len({gpu_ns for _, gpu_ns in prices}) <= 1
    if same_gpu or len(prices) > _EXACT_EXPERTS:
        return chosen
    return _search(prices, least_ns) or chosen


def _best_prefix(ordered: Sequence[tuple[int, int]]) -> tuple[int, int]:
    """Return how many experts, from the first, the GPU should take, and the maximum that gives."""
    cpu_ns, gpu_ns = sum(cpu for cpu, _ in ordered), 0
    best = (cpu_ns, 0)
    for number, (cpu, gpu) in enumerate(ordered, 1):
        cpu_ns -= cpu
        gpu_ns += gpu
        if max(cpu_ns, gpu_ns) <= best[0]:
            best = (max(cpu_ns, gpu_ns), number)
    return best[1], best[0]


def _search(prices: Sequence[tuple[int, int]], least_ns: int) -> list[bool] | None:
    """Return a division with a maximum below ``least_ns``, the best there is; None if there is none.

    Keeps, expert by expert, the pairs of sums that no other pair beats on both sides.
    """
    front: list[tuple[int, int, int]] = [(0, 0, 0)]  # CPU sum, GPU sum, experts on the CPU as bits
    for place, (cpu, gpu) in enumerate(prices):
        grown = [(c, g + gpu, bits) for c, g, bits in front if g + gpu < least_ns]
        grown += [(c + cpu, g, bits | 1 << place) for c, g, bits in front if c + cpu < least_ns]
        grown.sort()
        front, lowest = [], least_ns
        for state in grown:
            if state[1] < lowest:
                lowest = state[1]
                front.append(state)
    if not front:
        return None
    bits = min(front, key=lambda state: max(state[0], state[1]))[2]
    return [bool(bits >> place & 1) for place in range(len(prices))]
