"""Networks: torsos, recurrent cells, parameter sharing, and heads that turn outputs into distributions."""

from jmarl.networks import actor_critic, attention, entities, heads, mixers, retention, retentive, transformer, window
from jmarl.networks.initializers import INITIALIZERS, orthogonal
from jmarl.networks.recurrent import CELLS, GRU, LSTM, gru_scan
from jmarl.networks.sharing import SHARING, ensemble, network, one_step, per_agent, per_group, share, shared
from jmarl.networks.torsos import ACTIVATIONS, CNN, MLP, Dueling, Model, Output
from jmarl.networks.window import WindowAttention

__all__ = [
    "ACTIVATIONS",
    "CELLS",
    "CNN",
    "GRU",
    "INITIALIZERS",
    "LSTM",
    "MLP",
    "SHARING",
    "Dueling",
    "Model",
    "Output",
    "WindowAttention",
    "actor_critic",
    "attention",
    "ensemble",
    "entities",
    "gru_scan",
    "heads",
    "mixers",
    "network",
    "one_step",
    "orthogonal",
    "per_agent",
    "per_group",
    "retention",
    "retentive",
    "share",
    "shared",
    "transformer",
    "window",
]
