"""What the payload's unit tests share."""

from tests.support.payload import (  # noqa: F401
    device,
    pythons_own_intern,
    real_device,
    tensorboard_alone,
)
