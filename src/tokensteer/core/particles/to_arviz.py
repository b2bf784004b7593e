"""A `Result` in ArviZ's form, whose diagnostics compare chains: here, populations."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tokensteer.core.particles.result import Result


def to_arviz(result: Result, draws: int | None = None) -> object:
    """See `Result.to_arviz`. Draws of one population are not independent of one another; populations are."""
    try:
        import arviz  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise ImportError("Result.to_arviz needs arviz: pip install arviz") from error
    index = result.draw(result.log_w.shape[1] if draws is None else draws)
    groups: dict[str, Any] = {"posterior": {"x": result.pick(index).cpu().numpy()}}
    if result.reward is not None:
        groups["sample_stats"] = {"reward": result.reward.gather(1, index).cpu().numpy()}
    library: Any = arviz
    old = int(str(library.__version__).split(".")[0]) < 1
    return library.from_dict(**groups) if old else library.from_dict(groups)
