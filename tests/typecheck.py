"""The type checker that tests install for jmarl."""

from beartype import beartype


def typecheck(function):
    """beartype, except on the constructors of our dataclasses.

    They are pytrees: `vmap` axes, shapes from `eval_shape`, optimiser masks and checkpoint targets are built with the
    same constructor and hold no arrays.
    """
    return function if function.__name__ == "__init__" else beartype(function)
