"""Algorithms from algorithms: each function here takes some and gives one, `(spec, cfg) -> Learner` again.

Its config holds that of the algorithm within, as `cfg.inner` or by the name of a team, and dotted names reach it
everywhere: `jmarl.sweep(cfg, **{"inner.learning_rate": [1e-4, 1e-3]})`. Its state is arrays, as any learner's.
"""

from jmarl.combinators.intrinsic import ICMConfig, RNDConfig, icm, icm_losses, rnd, rnd_error
from jmarl.combinators.nesting import part
from jmarl.combinators.normalized import NormalizedConfig, normalized
from jmarl.combinators.self_play import SelfPlayConfig, self_play
from jmarl.combinators.shaped import ShapedConfig, shaped
from jmarl.combinators.teams import frozen, members_of, spec_of, teams

__all__ = [
    "ICMConfig",
    "NormalizedConfig",
    "RNDConfig",
    "SelfPlayConfig",
    "ShapedConfig",
    "frozen",
    "icm",
    "icm_losses",
    "members_of",
    "normalized",
    "part",
    "rnd",
    "rnd_error",
    "self_play",
    "shaped",
    "spec_of",
    "teams",
]
