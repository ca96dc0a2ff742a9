"""The type checker that tests install for jmarl."""

import inspect
from typing import Any

import jaxtyping
from beartype import beartype

_CHECKERS = {}


def install():
    """Check jmarl, from its import on, but for functions without annotations: wrapping them finds nothing.

    Most of those are nested: they would be wrapped anew at each call of the function around them.
    """
    jaxtyped = jaxtyping.jaxtyped

    def where_annotated(*, typechecker):
        wrap = jaxtyped(typechecker=typechecker)
        return lambda made: made if inspect.isfunction(made) and not made.__annotations__ else wrap(made)

    jaxtyping.jaxtyped = where_annotated  # the hook's decorator looks it up by this name
    jaxtyping.install_import_hook("jmarl", "typecheck.typecheck")


def typecheck(function):
    """beartype, except on the constructors of our dataclasses.

    They are pytrees: `vmap` axes, shapes from `eval_shape`, optimiser masks and checkpoint targets are built with the
    same constructor and hold no arrays.

    jaxtyping asks for two checkers of each function: of its arguments, before the call, and of the arguments and the
    result, after it. The second need not look at the arguments again: axes are remembered from one to the other.
    Neither has a body, so a nested function that is made again gets the ones written when it was first made.
    """
    if function.__name__ == "__init__":
        return function
    returned = function.__annotations__.get("return", Any)
    if returned is not Any:
        function.__annotations__ = {"return": returned}
    defaults = (function.__defaults__, *(function.__kwdefaults__ or {}).items())  # checked as a checker is written
    key = (function.__module__, function.__qualname__, function.__code__, *function.__annotations__.items(), *defaults)
    try:
        known = _CHECKERS.get(key)
    except TypeError:  # an annotation or a default without a hash
        return beartype(function)
    if known is None:
        known = _CHECKERS[key] = beartype(function)
    return known
