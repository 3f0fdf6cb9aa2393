"""A folder for sockets that cannot be used is named, with the key of the setting."""

from pathlib import Path

import pytest

from common.dataplane.fd_server import FdServer
from common.dataplane.port import DataPlaneError


def test_a_file_in_the_place_of_the_folder_is_named_with_its_setting(tmp_path: Path) -> None:
    """People see this text and nothing else when a worker does not start."""
    (tmp_path / "file").write_text("")
    with pytest.raises(DataPlaneError, match=r"transport_dir.*file"):
        FdServer(tmp_path / "file")
