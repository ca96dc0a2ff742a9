"""What learners check in a config before anything is traced."""

from collections.abc import Callable
from typing import Any, get_args

from jmarl import networks

_WIDTHS = ("hidden_sizes", "head_sizes", "critic_sizes", "mixer_hypernet_sizes", "central_sizes")
_SCHEDULES = ("constant", "linear", "exponential")


def validate(cfg: Any, options: dict[str, tuple[Any, ...]]) -> None:
    """Static facts of a config, and numbers that are not tracers, in a sentence for each that cannot be meant.

    Args:
      cfg: of any learner.
      options: what its own fields may be, beside those that learners share.
    """
    options = {
        "other_actions": ("stored", "current", "joint"),
        "critic_view": ("obs", "state", "state_obs"),
        "team_reward": ("individual", "sum", "mean"),
        "learning_rate_schedule": _SCHEDULES,
        "ent_coef_schedule": _SCHEDULES,
        "epsilon_schedule": _SCHEDULES,
        "noise_schedule": _SCHEDULES,
        "activation": tuple(networks.ACTIVATIONS),
        "kernel_init": tuple(networks.INITIALIZERS),
        "cell": tuple(networks.CELLS),
        "sharing": networks.SHARING,
        **options,
    }
    for name, field in cfg.__dataclass_fields__.items():
        value = getattr(cfg, name)
        if value is None and field.default is not None and type(None) not in get_args(field.type):
            raise ValueError(f"{name}=None has no meaning: leave it out for {field.default!r}.")
        if value is not None and value not in options.get(name, (value,)):
            raise ValueError(f"{name}={value!r} is unknown here: choose one of {', '.join(options[name])}.")
        if name in _WIDTHS and not isinstance(value, tuple | list):
            raise ValueError(f"{name}={value!r} must hold one width for each layer: write {name}=({value},) for one.")
        if name in _WIDTHS and any(size < 1 for size in value):
            raise ValueError(f"{name}={value} must hold positive widths.")

    counts = ("n_step", "num_critics", "num_epochs", "num_minibatches", "policy_delay", "target_update_interval")
    sizes = ("cell_size", "mixer_embed_size", "recurrent_length")
    shares = (
        "gamma",
        "gae_lambda",
        "lambda_",
        "tau",
        "epsilon_start",
        "epsilon_end",
        "standardize_beta",
        "value_norm_beta",
    )
    rates = ("learning_rate", "critic_learning_rate", "max_grad_norm", "clip_eps", "value_clip_eps", "huber_delta")
    deviations = ("noise_start", "noise_end", "target_noise", "target_noise_clip")
    require(cfg, (*counts, *sizes), lambda x: x >= 1, "be at least 1")
    require(cfg, shares, lambda x: 0 <= x <= 1, "lie in [0, 1]")
    require(cfg, rates, lambda x: x >= 0, "not be negative")
    require(cfg, deviations, lambda x: x >= 0, "not be negative: choose 0 for no noise")
    require(cfg, ("mixer_scale",), lambda x: x > 0, "be positive: weights that start at 0 together never learn")
    for kind in ("epsilon", "noise"):
        if getattr(cfg, f"{kind}_schedule", None) == "exponential":
            rule = "be positive for an exponential schedule, which never gets to 0: choose linear, or a small number"
            require(cfg, (f"{kind}_start", f"{kind}_end"), lambda x: x > 0, rule)
    burn_in = getattr(cfg, "burn_in", 0)
    if burn_in < 0 or (burn_in and not cfg.recurrent):
        raise ValueError(f"burn_in={burn_in} warms up recurrent networks: set recurrent=True, or burn_in=0.")


def require(cfg: Any, names: tuple[str, ...], is_right: Callable[[Any], bool], rule: str) -> None:
    """What these fields must be, where a config has them: `rule` follows the word "must". Tracers cannot be asked."""
    for name in names:
        value = getattr(cfg, name, None)
        if isinstance(value, int | float) and not is_right(value):
            raise ValueError(f"{name}={value} must {rule}.")
