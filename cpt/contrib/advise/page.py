"""The advice for people: first learned against forgotten as a plane, then the arms and what is not known."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from cpt.reporting.drawing import figure, literal, png, style
from cpt.reporting.page import Block

if TYPE_CHECKING:
    from matplotlib.axes import Axes

HEAD = ["arm", "what it is", "front", "learned", "forgotten", "of it: FG", "drift", "worth against it"]
LEGEND = (
    "Nats per token, with 95 % intervals over documents and seeds, drawn alike for all arms. Learned: how "
    "much lower the loss on a domain is just after it was learned than the base's. Forgotten: how much the "
    "loss has grown at the end on what was known before, a mean over the earlier domains (FG) and the "
    "general text (drift). The last column: the arm's worth by what was wished, minus that of the "
    "recommended one; where an epoch is extrapolated, after that."
)
Arm = Mapping[str, Any]


def make_blocks(advice: Mapping[str, Any]) -> list[Block]:
    best = find_arm(advice, advice["recommended"]["arm"])
    return [
        Block(title=f"Recommended: {best['arm']}", lines=tell(advice), picture=draw(advice), name="plane"),
        Block(title="The command", code=advice["recommended"]["command"]),
        Block(
            title="What each arm traded",
            lines=[LEGEND],
            head=HEAD,
            words=3,
            chosen=(0, 1, 3, 4, 7),
            cells=[row_of(arm) for arm in advice["arms"]],
        ),
        Block(title="What is not known", lines=[f"· {line}" for line in advice["unknown"]]),
    ]


def tell(advice: Mapping[str, Any]) -> list[str]:
    """What is recommended, why, and at what trade."""
    best, at = find_arm(advice, advice["recommended"]["arm"]), advice["measured"]
    seeds = f"{len(at['seeds'])} seed{'s' * (len(at['seeds']) > 1)}"
    trade = f"learned {span(best, 'learned')}, forgotten {span(best, 'forgotten')} nats."
    lines = [
        f"{best['meaning']}: {advice['recommended']['why']}.",
        f"After {at['steps']} steps ({at['tokens']:,} tokens) a domain, {seeds}: {trade}",
    ]
    if "learned_at" in best["intervals"]:
        bounds = best["intervals"]
        lines.append(
            f"After {at.get('judged_steps', at['epoch_steps'])} steps a domain (an epoch has about "
            f"{at['epoch_steps']}), extrapolated: learned "
            f"{show(bounds['learned_at'])}, forgotten {show(bounds['forgotten_at'])} nats."
        )
    return lines


def find_arm(advice: Mapping[str, Any], name: str) -> Arm:
    return next(arm for arm in advice["arms"] if arm["arm"] == name)


def span(arm: Arm, name: str) -> str:
    return f"{arm[name]:.4f} {show(arm['intervals'][name])}"


def show(bounds: Sequence[float | None]) -> str:
    if None in bounds:
        return "[–]"  # of one document there is no interval
    return f"[{bounds[0]:.4f}, {bounds[1]:.4f}]"


def row_of(arm: Arm) -> list[str]:
    numbers = [span(arm, name) if arm[name] is not None else "–" for name in ("learned", "forgotten")]
    parts = [f"{arm[name]:.4f}" if arm[name] is not None else "–" for name in ("FG", "drift")]
    worth = arm["intervals"]["worth"]
    against = show(worth) if any(worth) else "–"
    return [arm["arm"], arm["meaning"], "yes" if arm["on_front"] else "", *numbers, *parts, against]


def draw(advice: Mapping[str, Any]) -> bytes:
    """The plane, its front, the lines over tokens, the bound and the recommended arm."""
    drawn = figure((8.0, 5.2))
    axes = drawn.subplots()
    for number, arm in enumerate(advice["arms"]):
        draw_arm(axes, arm, style(number))
    front = sorted((arm for arm in advice["arms"] if arm["on_front"]), key=lambda arm: arm["learned"])
    places = [[arm[name] for arm in front] for name in ("learned", "forgotten")]
    axes.plot(*places, color="0.6", linewidth=1, zorder=0, label="front")
    best = find_arm(advice, advice["recommended"]["arm"])
    ring = {"marker": "o", "markersize": 17, "markerfacecolor": "none", "markeredgecolor": "black"}
    axes.plot(best["learned"], best["forgotten"], linestyle="none", label="recommended", **ring)
    if (bound := advice["wish"]["bound"]) is not None:
        axes.axhline(bound, color="0.3", linewidth=1, linestyle="--", label="accepted")
    axes.axhline(0, color="0.85", linewidth=0.8, zorder=0)
    if len(advice["measured"]["lengths"]) > 1:
        axes.plot([], [], color="0.5", linewidth=1, linestyle=":", label="over tokens")
    axes.set(xlabel="learned (nats; right is better)", ylabel="forgotten (nats; down is better)")
    axes.margins(0.12)
    axes.legend(fontsize=8, markerscale=0.5, loc="upper left")
    told = "; ".join(f"{arm['arm']}: {arm['learned']:.3f}, {arm['forgotten']:.3f}" for arm in advice["arms"])
    return png(drawn, told=f"Learned against forgotten, {best['arm']} recommended. {told}")


def draw_arm(axes: Axes, arm: Arm, look: Mapping[str, str]) -> None:
    """A point with its intervals, and the way to it from its shorter length."""
    there, own = (arm["learned"], arm["forgotten"]), {"color": look["color"]}
    reach = [
        [[max(0.0, value - low)], [max(0.0, high - value)]]
        for value, (low, high) in zip(
            there, (arm["intervals"][name] for name in ("learned", "forgotten")), strict=True
        )
    ]
    axes.errorbar(
        *there, xerr=reach[0], yerr=reach[1], marker=look["marker"], markersize=6, linewidth=0.7, **own
    )
    path = sorted(arm["lengths"], key=lambda each: each["steps"])
    places = [[each[name] for each in path] for name in ("learned", "forgotten")]
    axes.plot(*places, linestyle=":", linewidth=1, **own)
    axes.annotate(
        literal(arm["arm"], width=30), there, textcoords="offset points", xytext=(6, 6), fontsize=8, **own
    )
