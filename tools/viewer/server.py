"""The page of a run as a file, or served on this machine while the run goes on."""

from __future__ import annotations

import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Lock

from gapo_megatron.config import CONFIG_NAME, load_recorded
from gapo_megatron.errors import ConfigError, GapoError
from gapo_megatron.io.files import check_overwritable, naming, real, write_atomically
from gapo_megatron.io.metric_files import METRICS_NAME
from gapo_megatron.io.sample_files import SAMPLES_NAME
from gapo_megatron.io.token_files import token_files
from gapo_tools.viewer.data import has_samples, read_data
from gapo_tools.viewer.page import is_made, make_page

PAGE_NAME = "view.html"
_HOST = "127.0.0.1"
_POLL_S = 2.0


def render(run: Path, *, first: int = 0, last: int | None = None, live: str = "") -> str:
    """The page of a run; arguments and errors as of `read_data`; `live` as of `make_page`."""
    name = real(run).name
    return make_page(
        [read_data(run, name, first=first, last=last)], title=f"Answers: {name}", live=live
    )


def write(run: Path, output: Path | None, *, first: int = 0, last: int | None = None) -> Path:
    """Write the page; returns its path.

    Args:
        run: folder of the run.
        output: where; None: view.html in `run`.
        first: first step to show.
        last: last step to show; None: the newest.

    Raises:
        DataError, ConfigError: see `read_data`; `output` is no file that we may write, or there is
            a file that this command did not make.
        MachineError: the disk is full or fails.
    """
    if output is not None and (output.suffix != ".html" or not output.absolute().parent.is_dir()):
        raise ConfigError(f"--output ({output}) must be a file *.html in an existing folder")
    page = output or run / PAGE_NAME
    check_overwritable(page.parent, [page.name], field="--output", is_ours=is_made(page))
    write_atomically(page, render(run, first=first, last=last))
    return page


def serve(run: Path, *, port: int | None, first: int = 0, last: int | None = None) -> None:
    """Serve the page on 127.0.0.1, made anew when the run has more to show, until Ctrl-C.

    Raises:
        MachineError: the port is taken.
    """
    with make_server(run, port=port, first=first, last=last) as server:
        print(f"live: http://{_HOST}:{server.server_port}/  (Ctrl-C ends it)", flush=True)
        server.serve_forever()


def await_first_step(run: Path) -> None:
    """Wait until a run has samples; not for a folder that is no run, or a run that keeps none.

    Raises:
        DataError, ConfigError: see `read_data`.
    """
    if not (run / CONFIG_NAME).exists() or has_samples(run):
        return
    if load_recorded(run / CONFIG_NAME).metrics.samples_per_step == 0:
        return
    print(f"waiting for the first step of {run}  (Ctrl-C ends it)", flush=True)
    while not has_samples(run):
        time.sleep(_POLL_S)


def make_server(
    run: Path, *, port: int | None, first: int = 0, last: int | None = None
) -> ThreadingHTTPServer:
    """A server that is bound but does not serve yet; see `serve`."""
    lock, pages = Lock(), dict[str, str]()

    def newest() -> str:
        # A step's tokens, its samples and its metrics are written one after the other.
        sizes = (_size(run / name) for name in (SAMPLES_NAME, METRICS_NAME))
        return "-".join(map(str, (max(token_files(run), default=0), *sizes)))

    def page() -> str:
        with lock:
            state = newest()
            if state not in pages:
                made = render(run, first=first, last=last, live=state)
                pages.clear()
                pages[state] = made
            return pages[state]

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            # Another site's name may lead here, too: its pages must not read this one.
            if self.headers.get("Host") not in {f"{n}:{port_of}" for n in (_HOST, "localhost")}:
                self.send_error(403)
                return
            answers = {"/": ("text/html", page), "/newest": ("text/plain", newest)}
            if self.path not in answers:
                self.send_error(404)
                return
            kind, make = answers[self.path]
            try:
                content, status = make().encode(), 200
            except GapoError as error:
                content, status, kind = f"{error}\n".encode(), 500, "text/plain"
            self.send_response(status)
            self.send_header("Content-Type", f"{kind}; charset=utf-8")
            self.send_header("Content-Length", str(len(content)))
            self.send_header("X-Content-Type-Options", "nosniff")
            self.send_header("Cache-Control", "no-store")
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *_: object) -> None:
            """Nothing: requests every few seconds are no news."""

    with naming(f"--port {port or 'any'} of {_HOST}"):
        server = ThreadingHTTPServer((_HOST, port or 0), Handler)
    port_of = server.server_port
    return server


def _size(path: Path) -> int:
    with naming(path):
        return path.stat().st_size if path.exists() else 0
