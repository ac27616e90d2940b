"""Types for calls that accept an options record or its fields as keywords (`option.takes`).

Only type checkers use them. The last overload of each accepts any keyword, for plugins.
"""

from __future__ import annotations

from typing import Any, ParamSpec, Protocol, TypeVar, overload

P = ParamSpec("P")
Asked_contra = TypeVar("Asked_contra", contravariant=True)
A_contra = TypeVar("A_contra", contravariant=True)
B_contra = TypeVar("B_contra", contravariant=True)
C_contra = TypeVar("C_contra", contravariant=True)
Result_co = TypeVar("Result_co", covariant=True)


class OfOne(Protocol[A_contra, P, Asked_contra, Result_co]):
    """A call with one argument, and options as a record or as keywords."""

    @overload
    def __call__(self, first: A_contra, options: Asked_contra, /) -> Result_co: ...
    @overload
    def __call__(self, first: A_contra, /, *args: P.args, **kwargs: P.kwargs) -> Result_co: ...
    @overload
    def __call__(self, first: A_contra, /, **of_plugins: Any) -> Result_co: ...


class OfTwo(Protocol[A_contra, B_contra, P, Asked_contra, Result_co]):
    """A call with two arguments, and options as a record or as keywords."""

    @overload
    def __call__(
        self, first: A_contra, second: B_contra, options: Asked_contra, /
    ) -> Result_co: ...
    @overload
    def __call__(
        self, first: A_contra, second: B_contra, /, *args: P.args, **kwargs: P.kwargs
    ) -> Result_co: ...
    @overload
    def __call__(self, first: A_contra, second: B_contra, /, **of_plugins: Any) -> Result_co: ...


class OfThree(Protocol[A_contra, B_contra, C_contra, P, Asked_contra, Result_co]):
    """A call with three arguments, and options as a record or as keywords."""

    @overload
    def __call__(
        self, first: A_contra, second: B_contra, third: C_contra, options: Asked_contra, /
    ) -> Result_co: ...
    @overload
    def __call__(
        self,
        first: A_contra,
        second: B_contra,
        third: C_contra,
        /,
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> Result_co: ...
    @overload
    def __call__(
        self, first: A_contra, second: B_contra, third: C_contra, /, **of_plugins: Any
    ) -> Result_co: ...
