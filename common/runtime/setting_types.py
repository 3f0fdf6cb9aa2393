"""Types that many settings share, with their bounds."""

from typing import Annotated, Literal, TypeAlias

import msgspec

Count = Annotated[int, msgspec.Meta(ge=1)]
Seconds = Annotated[float, msgspec.Meta(gt=0)]
Share = Annotated[float, msgspec.Meta(ge=0, le=1)]
Port = Annotated[int, msgspec.Meta(ge=0, le=65535)]
NatsReplicas: TypeAlias = Literal[1, 3, 5]
LogLevel: TypeAlias = Literal["debug", "info", "warning", "error"]
