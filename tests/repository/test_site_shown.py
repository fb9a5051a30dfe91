"""The site as its readers meet it: what the search finds first, and pages on a phone and on a desk."""

import functools
import html
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT, run

PAGE_OF = {  # what people type -> pages that answer it
    "normalize observation": "recipes",
    "normalize": "recipes pitfalls",
    "vector env": "recipes",
    "gpu": "gpu",
    "multi gpu": "gpu",
    "lstm": "recipes",
    "recurrent": "recipes",
    "flax": "adopting",
    "jax": "adopting",
    "evaluation": "recipes train",
    "checkpoint": "recipes run_folder",
    "hyperparameters": "train",
    "simulator": "simulators",
    "wandb": "recipes",
    "tensorboard": "recipes tools",
    "slurm": "cluster",
    "seed": "pitfalls",
    "resume": "run_folder",
    "custom environment": "environments",
    "stable-baselines3": "sb3",
    "spinning up": "spinning_up examples/index",
    "keras": "adopting spinning_up examples/index",
    "atari": "environments",
    "video": "tools index run_folder",
    "hang": "failures",
}
WIDTHS = {"phone": 390, "desk": 1280}
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
MEASURE = """<!DOCTYPE html><body style="margin:0"><pre></pre><script>
const clips = element => element && (getComputedStyle(element).overflowX != "visible" || clips(element.parentElement));
async function look(page) {
  const frame = document.body.appendChild(document.createElement("iframe"));
  frame.style = "border:0;width:WIDTHpx;height:900px";
  await new Promise(done => { frame.onload = done; frame.src = page; });
  const doc = frame.contentDocument, width = doc.documentElement.clientWidth;
  const beyond = [...doc.querySelectorAll(".md-content *")].filter(
    element => element.getBoundingClientRect().right > width + 1 && !clips(element.parentElement));
  const cut = [...doc.querySelectorAll(".language-sh code")].filter(code => code.scrollWidth > code.clientWidth + 1);
  frame.remove();
  return [...beyond, ...cut].map(element => page + ": " + element.textContent.slice(0, 60));
}
(async () => {
  const found = [];
  for (const page of PAGES) found.push(...await look(page));
  document.querySelector("pre").textContent = "found " + JSON.stringify(found);
})();
</script>"""


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The folder of the site, built."""
    folder = tmp_path_factory.mktemp("site")
    done = run([sys.executable, "-m", "mkdocs", "build", "--strict", "-d", folder], 200, {"NO_MKDOCS_2_WARNING": "1"})
    assert done.status == 0, done.err
    return folder


@functools.cache
def index_of(site: Path):
    """The search's index, with the weights that the site's own search gives to titles and pages."""
    from lunr import lunr

    sections = json.loads((site / "search" / "search_index.json").read_text())["docs"]
    fields = [{"field_name": "title", "boost": 1000}, {"field_name": "text", "boost": 1}]
    documents = [(section, {"boost": section.get("boost", 1)}) for section in sections]
    return lunr(ref="location", fields=fields, documents=documents)


@pytest.mark.slow
@pytest.mark.parametrize("typed", PAGE_OF)
def test_the_search_finds_a_page_that_answers(site, typed):
    found = index_of(site).search(" ".join(f"+{word}" for word in re.split(r"[\s-]", typed)))
    pages = [re.sub(r"\.html.*", "", one["ref"]) for one in found]
    assert pages and pages[0] in PAGE_OF[typed].split(), pages[:5]


@pytest.mark.slow
def test_signatures_are_formatted_with_types(site):
    page = (site / "api.html").read_text()
    signature = html.unescape(
        re.sub("<[^>]+>", "", page[page.index('id="mpi_util.collectives.collecting.collect"') :][:9000])
    )
    assert re.search(r"collect\(\n    play: Callable.*,\n", signature), signature[:600]


@pytest.mark.slow
@pytest.mark.skipif(not CHROMIUM, reason="no Chromium")
@pytest.mark.parametrize("width", WIDTHS.values(), ids=WIDTHS)
def test_nothing_sticks_out_of_a_page(site, width, tmp_path):
    pages = sorted(path.relative_to(site).as_posix() for path in site.rglob("*.html") if path.name != "404.html")
    (site / "measure.html").write_text(MEASURE.replace("WIDTH", str(width)).replace("PAGES", json.dumps(pages)))
    text = browser(
        site / "measure.html", width, "--dump-dom", "--disable-web-security", "--allow-file-access-from-files"
    )
    found = re.search(r"<pre>found (.*?)</pre>", text)
    assert found, text[:300]
    assert json.loads(html.unescape(found[1])) == []
    picture = tmp_path / "front.png"
    browser(site / "index.html", width, f"--screenshot={picture}")
    assert picture.stat().st_size > 20_000


def browser(page: Path, width: int, *options: str) -> str:
    """What Chromium prints of a page."""
    command = [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", f"--window-size={width},900"]
    command += ["--virtual-time-budget=60000", *options, page.as_uri()]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=ROOT).stdout
