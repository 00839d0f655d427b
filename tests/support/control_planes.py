"""A control plane in this process, on a real socket, with a clock of the test's."""

import threading
from contextlib import closing, contextmanager
from pathlib import Path

from frostline.control.app import ControlPlane, make_control_app
from frostline.control.settings import ControlSettings
from frostline.control.shares import Amounts
from frostline.control.state import ControlState
from frostline.control.store import RecordStore
from frostline.node.http.server import AppServer, listen


class Clock:
    def __init__(self):
        self.now_s = 1000.0

    def __call__(self):
        return self.now_s


@contextmanager
def control_plane(folder, clock, *, port=0, jobs=(), tenants=(), prices=None, **capacity):
    """Gives its URL and its state."""
    settings = ControlSettings(capacity=Amounts(**capacity), jobs=jobs, tenants=tenants, prices=prices)
    with closing(RecordStore(Path(folder) / "plane.state")) as store:
        state = ControlState(settings, store.records(), changes=store.changes(), events=store.events(), now_s=clock())
        server = AppServer(make_control_app(ControlPlane(state, store, clock)), listen("127.0.0.1", port))
        ready = threading.Event()
        thread = threading.Thread(target=server.run, args=[ready.set])
        thread.start()
        assert ready.wait(60)
        try:
            yield server.url, state
        finally:
            server.stop()
            thread.join()
