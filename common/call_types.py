"""Types for calls that accept an options record or its fields as keywords (`option.takes`).

Only type checkers use these types. The last overload of each accepts plugins' keywords.
"""

from __future__ import annotations

from typing import Any, ParamSpec, Protocol, TypeVar, overload

P = ParamSpec("P")
Options_contra = TypeVar("Options_contra", contravariant=True)
A_contra = TypeVar("A_contra", contravariant=True)
B_contra = TypeVar("B_contra", contravariant=True)
C_contra = TypeVar("C_contra", contravariant=True)
Result_co = TypeVar("Result_co", covariant=True)


class OneArgument(Protocol[A_contra, P, Options_contra, Result_co]):
    """A call with one argument, plus options as a record or as keywords."""

    @overload
    def __call__(self, first: A_contra, options: Options_contra, /) -> Result_co: ...
    @overload
    def __call__(self, first: A_contra, /, *args: P.args, **kwargs: P.kwargs) -> Result_co: ...
    @overload
    def __call__(self, first: A_contra, /, **of_plugins: Any) -> Result_co: ...


class TwoArguments(Protocol[A_contra, B_contra, P, Options_contra, Result_co]):
    """A call with two arguments, plus options as a record or as keywords."""

    @overload
    def __call__(
        self, first: A_contra, second: B_contra, options: Options_contra, /
    ) -> Result_co: ...
    @overload
    def __call__(
        self, first: A_contra, second: B_contra, /, *args: P.args, **kwargs: P.kwargs
    ) -> Result_co: ...
    @overload
    def __call__(self, first: A_contra, second: B_contra, /, **of_plugins: Any) -> Result_co: ...


class ThreeArguments(Protocol[A_contra, B_contra, C_contra, P, Options_contra, Result_co]):
    """A call with three arguments, plus options as a record or as keywords."""

    @overload
    def __call__(
        self, first: A_contra, second: B_contra, third: C_contra, options: Options_contra, /
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
