"""The page as a browser shows it, without network and without a server."""

import html
import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

BROWSER = next(
    (found for name in ("chromium", "chromium-browser", "google-chrome") if (found := shutil.which(name))), None
)
needs_browser = pytest.mark.skipif(BROWSER is None, reason="no chromium on this machine (apt-get install chromium)")

# runs after the page's own script; what it gathers is read back out of the DOM
PROBE = """
<script>
const wait = (ms) => new Promise((done) => setTimeout(done, ms));
const press = async (key) => {
  document.dispatchEvent(new KeyboardEvent("keydown", { key, bubbles: true }));
  await wait(60);
};
const text = (cells) => [...cells].map((c) => c.textContent);
const cells = () => [...document.querySelectorAll("#token-body table")].map(
  (t) => [t.dataset.method, [...t.rows].slice(1).map((r) => text(r.cells))]);
const inked = () => [...document.querySelectorAll("span.t[data-i]")].map(
  (s) => [Number(s.dataset.i), s.className, s.style.background]);
const value = (id) => document.getElementById(id).value;
window.addEventListener("error", (e) => { document.body.dataset.error = e.message; });
window.addEventListener("unhandledrejection", (e) => { document.body.dataset.error = String(e.reason); });
(async () => {
  while (document.body.dataset.ready !== "yes") await wait(20);
  await wait(60);
  const found = await (async () => { %s })();
  const out = document.createElement("pre");
  out.id = "probe";
  out.textContent = JSON.stringify(found);
  document.body.append(out);
})();
</script>
"""


def browse(page: str, folder: Path, script: str, *, fragment: str = "", budget_ms: int = 6000):
    """Open the page from disk, run `script` (async, returns JSON) and give back what it returns."""
    path = folder / "page.html"
    path.write_text(page.replace("</body>", PROBE % script + "</body>"), encoding="utf-8")
    command = [
        BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--window-size=1400,1000",
        "--host-resolver-rules=MAP * ~NOTFOUND", f"--user-data-dir={folder / 'profile'}",
        f"--virtual-time-budget={budget_ms}", "--dump-dom", path.as_uri() + fragment,
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    failed = re.search(r'<body[^>]* data-error="([^"]*)"', done.stdout)
    assert not failed, failed.group(1)
    probe = re.search(r'<pre id="probe">(.*?)</pre>', done.stdout, re.DOTALL)
    assert probe, done.stdout[-2000:] + done.stderr[-2000:]
    return json.loads(html.unescape(probe.group(1)))
