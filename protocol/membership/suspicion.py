"""How long a suspect has to speak up (SWIM suspicion with Lifeguard's shrinking timeout).

The minimum grows with half the logarithm of the mesh, from ten nodes on: what grows with the mesh is the time a refutation
takes to everybody, and that is below a second where memberlist, from which the full logarithm is known, needs several.
The timeout starts at ``maximum = factor × minimum`` and falls to ``minimum`` as independent accusers confirm:
``maximum − (maximum − minimum) · log(c + 1) / log(k + 1)`` for c of k confirmations (Dadgar et al., "Lifeguard", 2018).
With fewer than four nodes nobody can confirm, so the minimum applies at once. The clock runs from the moment the
unanswered probe was *sent*: the silence is at least that old.
"""

import math

from config.settings import MembershipSettings

CONFIRMATIONS = 2
"""Independent accusers beside the first that shorten the wait to its minimum, from four nodes on."""
_SHARE_MILLI = tuple(
    1000 if c == CONFIRMATIONS else int(1000 * math.log(c + 1) / math.log(CONFIRMATIONS + 1))
    for c in range(CONFIRMATIONS + 1)
)


def suspicion_us(settings: MembershipSettings, nodes: int, accusers: int) -> int:
    """Wait of a suspect in a mesh of ``nodes`` (all live ones, this included) when ``accusers`` have said so."""
    if nodes < 4:
        return settings.suspicion_small_mesh_us
    minimum = settings.suspicion_us * max(1000, (1000 + int(1000 * math.log10(nodes))) // 2) // 1000
    maximum = minimum * settings.suspicion_max_factor
    confirmations = min(CONFIRMATIONS, max(0, accusers - 1))
    return maximum - (maximum - minimum) * _SHARE_MILLI[confirmations] // 1000
