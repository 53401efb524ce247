"""Whether a worker's machine sees the directory that its run is in."""

from __future__ import annotations

import os
import platform
import threading

from elastic.protocol.run_paths import RunPaths
from trainer.errors import StorageNotSeenError


class RunSight:
    """Looks as soon as it is made, on a thread: a network file system may take its time, and may
    show a file as it was before. Where checkpoints lie in a store elsewhere nobody looks: a worker
    does not need the directory then. The tokens may lie below it: `Worker.make_engine` looks at
    their files.

    Args:
        paths: the run's.
    """

    def __init__(self, paths: RunPaths) -> None:
        self._paths, self._sees = paths, True
        if paths.store is None:
            threading.Thread(target=self._look, name="run-sight", daemon=True).start()

    def check(self) -> None:
        """Asks once more where it was not there: the mount may have come later. While the file
        system does not answer it passes.

        Raises:
            StorageNotSeenError: this machine does not see the directory.
        """
        if not self._sees:
            self._look()
        if not self._sees:
            raise StorageNotSeenError(
                "run_config.storage_path",
                str(self._paths.root.parent),
                f"{self._paths.identity} is not there on machine {platform.node()}",
                "Mount it at this path on all machines, or use a path that all of them see",
            )

    def _look(self) -> None:
        self._sees = os.path.exists(self._paths.identity)  # False for all errors, unlike Path's
