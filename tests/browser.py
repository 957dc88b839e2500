"""A browser without a window, in which a test looks at a page and uses it."""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

from tests.needs import needs
from tests.waiting import HANG_S

_BROWSERS = ("chromium", "chromium-browser", "google-chrome")
BROWSER = next(filter(None, map(shutil.which, _BROWSERS)), None)
needs_browser = needs("" if BROWSER else "not installed: chromium (apt-get install chromium)")


def dump(page: Path | str, folder: Path) -> str:
    """The document as a browser has it after its scripts; `page` is a file or an address."""
    assert BROWSER is not None
    address = page.as_uri() if isinstance(page, Path) else page
    command = [BROWSER, "--headless=new", "--no-sandbox", "--disable-gpu", "--dump-dom"]
    command += [f"--user-data-dir={folder}/profile", "--virtual-time-budget=5000", address]
    done = subprocess.run(command, capture_output=True, text=True, timeout=HANG_S)
    assert done.returncode == 0 and done.stdout, done.stderr
    return done.stdout


def use(page: Path, folder: Path, script: str) -> Any:
    """What an asynchronous function with this body returns, run in the page after its own script.

    The page's policy refuses such a script: a copy allows it.
    """
    copy = folder / "copy.html"
    text, count = re.subn(
        r"script-src &#x27;[^;]*;", "script-src 'unsafe-inline';", page.read_text()
    )
    assert count == 1
    added = f"""<script>
    const wait = (ms) => new Promise((done) => setTimeout(done, ms));
    const all = (kind) => [...document.querySelectorAll(kind)];
    const choose = (name, value) => {{
        const one = document.getElementById(`choose-${{name}}`);
        one.value = value;
        one.dispatchEvent(new Event("change"));
    }};
    (async () => {{ {script} }})().then(
        (found) => {{ document.title = "found " + JSON.stringify(found); }},
        (error) => {{ document.title = "found " + JSON.stringify(`${{error}} ${{error.stack}}`); }},
    );
    </script></body>"""
    copy.write_text(text.replace("</body>", added))
    match = re.search(r"<title>found (.*?)</title>", dump(copy, folder), re.DOTALL)
    assert match, "the script has not ended"
    return json.loads(html.unescape(match[1]))
