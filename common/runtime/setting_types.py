"""Types that many settings share, with their bounds."""

from typing import Annotated, Literal, TypeAlias

import msgspec

Count = Annotated[int, msgspec.Meta(ge=1)]
Seconds = Annotated[float, msgspec.Meta(gt=0)]
Port = Annotated[int, msgspec.Meta(ge=0, le=65535)]
LogLevel: TypeAlias = Literal["debug", "info", "warning", "error"]
