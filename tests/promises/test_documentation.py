"""The code in the README and under docs/ runs as it stands, and the API pages have all that is public."""

import collections
import doctest
import importlib.util
import re
import sys

import keras
import numpy as np
import pytest
from support import pages
from support.suites import some

import keras_shardopt as ks
from keras_shardopt.backends.active import processes
from keras_shardopt.fit import scope as parallel

BACKEND = keras.config.backend()
RUNNING = [page for page in pages.PAGES if any(block.runs_on(BACKEND) for block in pages.blocks(page))]


API = "\n".join(page.read_text(encoding="utf-8") for page in sorted((pages.DOCS / "api").rglob("*.md")))


def build_model():
    return keras.Sequential([keras.Input((4,)), keras.layers.Dense(8, activation="tanh"), keras.layers.Dense(1)])


def names_of_the_reader():
    """What a page takes to be there: imports, a model, data."""
    x = np.random.default_rng(0).normal(size=(64, 4)).astype("float32")
    return {
        "__name__": "__main__",
        "keras": keras,
        "np": np,
        "ks": ks,
        "Adam": keras.optimizers.Adam,
        "build_model": build_model,
        "loss_fn": keras.losses.MeanSquaredError(),
        "x": x,
        "y": x.sum(axis=1, keepdims=True),
    }


def run(block, names):
    where = f"{block.page.relative_to(pages.ROOT)}, line {block.line}"
    if block.code.startswith(">>>"):
        test = doctest.DocTestParser().get_doctest(block.code, names, where, where, block.line - 1)
        result = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS).run(test, clear_globs=False)
        names.update(test.globs)
        assert not result.failed, where
    else:
        exec(compile("\n" * (block.line - 1) + block.code, str(block.page), "exec"), names)


@pytest.fixture
def scopes(monkeypatch):
    """Two replicas where a page leaves the number open, which compiles faster than many; and none in the end."""
    real = processes.open

    def world(requested, timeout):
        is_open = BACKEND == "torch" or processes.num_replicas() > 1  # and then says how many
        return real(requested if is_open else requested or 2, timeout)

    monkeypatch.setattr(processes, "open", world)
    yield
    if parallel._lingering is not None:
        parallel._lingering.close()


@pytest.mark.parametrize(
    "page",
    some(RUNNING, [pages.README], "jax", "tensorflow"),  # what a newcomer reads first
    ids=lambda page: str(page.relative_to(pages.ROOT)),
)
def test_blocks_run_in_their_order(page, tmp_path, monkeypatch, scopes):
    monkeypatch.chdir(tmp_path)
    names = names_of_the_reader()
    for block in pages.blocks(page):
        if block.runs_on(BACKEND):
            run(block, names)


def test_a_block_that_is_wrong_fails(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("# Title\n\n<!-- not run: old -->\n```python\nold(\n```\n\n```python\nassert 1 == 2, 'two'\n```\n")
    old, new = pages.blocks(page)
    assert not old.runs_on(BACKEND) and new.runs_on(BACKEND) and new.line == 9
    with pytest.raises(ValueError, match="is not in the subpath"):
        run(new, {})
    page = pages.ROOT / "page.md"
    with pytest.raises(AssertionError, match="two"):
        run(pages.Block(page, 9, "python", new.code, "", ""), {})
    with pytest.raises(AssertionError, match="line 3"):
        run(pages.Block(page, 3, "python", ">>> 1 + 1\n3\n", "", ""), {})


@pytest.mark.neutral
def test_marks_are_known(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("\n<!-- only: jax -->\n```python\n```\n")
    with pytest.raises(AssertionError, match="only: jax"):
        pages.blocks(page)


@pytest.mark.neutral
def test_no_example_converts_a_variable_of_replicas_with_int_or_float():
    """On TensorFlow the copies of several replicas cannot be converted by `int(...)`, but by `convert_to_numpy`."""
    idiom = re.compile(
        r"\b(?:int|float)\((?:\w+\.)*\w*optimizer\.(?:iterations|skipped_steps|loss_scale|learning_rate)\)"
    )
    assert idiom.search("int(model.optimizer.iterations)")
    package = (pages.ROOT / "keras_shardopt").rglob("*.py")
    found = {
        path: path.read_text(encoding="utf-8") for path in (*pages.PAGES, *(pages.ROOT / "examples").rglob("*.py"))
    }
    # In the package itself only what is shown to users: examples, and code in backquotes.
    found |= {path: "\n".join(re.findall(r">>> .*|`[^`]+`", path.read_text(encoding="utf-8"))) for path in package}
    wrong = {str(path): idiom.findall(text) for path, text in found.items() if idiom.search(text)}
    assert not wrong


@pytest.mark.neutral
def test_every_public_name_is_on_one_api_page():
    listed = re.findall(r"^::: keras_shardopt\.(\S+)$", API, re.MULTILINE)
    modules = ("callbacks", "compression", "schedules")
    public = {name for name in ks.__all__ if name not in modules}
    public |= {f"{module}.{name}" for module in modules for name in getattr(ks, module).__all__}
    assert not public - set(listed)
    assert len(set(listed)) == len(listed)


@pytest.mark.neutral
def test_what_api_pages_name_is_there():
    entry = r"^::: keras_shardopt\.(\S+)\n(?:    options:\n      members: \[(.*)\])?"
    for name, members in re.findall(entry, API, re.MULTILINE):
        thing = ks
        for part in name.split("."):
            thing = getattr(thing, part)
        assert thing.__doc__, name
        for member in members.split(", ") if members else []:
            is_field = member in getattr(thing, "__dataclass_fields__", {})
            assert is_field or getattr(thing, member).__doc__, f"{name}.{member}"


@pytest.mark.neutral
def test_files_that_commands_and_links_name_are_there():
    for page in pages.PAGES:
        text = page.read_text(encoding="utf-8")
        for name in re.findall(r"\b((?:examples|benchmarks|tests)/\w+(?:/\w+)*\.py)\b", text):
            assert (pages.ROOT / name).is_file(), f"{page}: {name}"
    for link in re.findall(r"\]\(([^)#:]+)(?:#[\w-]+)?\)", pages.README.read_text(encoding="utf-8")):
        assert (pages.ROOT / link).exists(), link


def matrix():
    spec = importlib.util.spec_from_file_location("support_matrix", pages.DOCS / "support_matrix.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses ask for it
    spec.loader.exec_module(module)
    return module


@pytest.mark.neutral
def test_hooks_and_workflow_run_what_the_tests_run():
    pinned = dict(line.split("==") for line in read("constraints.txt").splitlines() if "==" in line)
    hooks = re.findall(r"additional_dependencies: \[(\w+)==([\d.]+)\]", read(".pre-commit-config.yaml"))
    assert hooks and all(pinned.get(name, version) == version for name, version in hooks)
    environments = set(
        re.findall(r"[\w-]+", " ".join(re.findall(r"environment: \[(.*)\]", read(".github/workflows/ci.yml"))))
    )
    by_default = set(re.findall(r"[\w-]+", re.search(r"^env_list = (.*)$", read("tox.ini"), re.MULTILINE)[1]))
    labelled = set(re.findall(r"[\w-]+", re.search(r"^    exhaustive = (.*)$", read("tox.ini"), re.MULTILINE)[1]))
    each = {"jax", "tensorflow", "torch", "together"}  # what `tests` does in one environment
    assert environments == (by_default - {"tests"}) | each | labelled
    assert set(re.findall(r"(exhaustive-\w+):\d+", read(".ci/run"))) == labelled


def read(name):
    return (pages.ROOT / name).read_text(encoding="utf-8")


@pytest.mark.neutral
def test_the_support_matrix_has_tests_that_exist_and_its_page_is_of_it():
    script = matrix()
    for feature in script.FEATURES:
        assert set(feature.tests) == set(pages.BACKENDS) or feature.remarks, feature.name
        for test in (test for tests in feature.tests.values() for test in tests):
            file, function = test.partition("[")[0].split("::")
            assert f"def {function}(" in (pages.ROOT / file).read_text(encoding="utf-8"), test
    written = script.PAGE.read_text(encoding="utf-8")
    assert written.startswith(script.HEAD)
    rows = re.findall(r"^\| (.+?) \|", written.removeprefix(script.HEAD), re.MULTILINE)
    assert rows[1:] == [feature.name for feature in script.FEATURES]


@pytest.mark.neutral
def test_the_support_matrix_counts_what_passed_and_says_what_failed(tmp_path):
    script = matrix()
    cases = {"a[1]": "", "a[2]@a group": "<failure/>", "b[x]@it": "", "b[y]": "", "c@it": "<skipped/>"}
    classname = 'classname="tests.unit.test_it"'
    cases = "".join(f'<testcase {classname} name="{name}">{inside}</testcase>' for name, inside in cases.items())
    (tmp_path / "jax-3.15.1.xml").write_text(f"<testsuites><testsuite>{cases}</testsuite></testsuites>")
    found = script.outcomes(tmp_path / "jax-3.15.1.xml")

    def cell(*tests, **more):
        feature = script.Feature("it", {"jax": [f"tests/unit/test_it.py::{t}" for t in tests]}, **more)
        return script.cell(feature, "jax", found)

    assert cell("a") == "✗ **fails**: 1 of 2"
    assert cell("b") == "✓ 2" and cell("b[x]") == "✓ 1"
    assert cell("c") == cell("gone") == "not run"
    assert cell("b", remarks={"jax": "in `fit`"}) == "◐ 2; in `fit`"
    assert cell() == "✗"
    assert script.cell(script.Feature("it", {}, {"jax": "is refused"}), "jax", found) == "✗ is refused"

    # Reports of one backend and version are one column; what two of them have counts once.
    feature = script.FEATURES[0]
    file, _, function = feature.tests["jax"][0].partition("::")
    for run, names in {"tests-default": "13", "exhaustive-jax-exhaustive": "23"}.items():
        cases = [f'<testcase classname="{file[:-3].replace("/", ".")}" name="{function}[{name}]"/>' for name in names]
        report = tmp_path / f"jax-3.15.1-{run}.xml"
        report.write_text(f"<testsuites><testsuite>{''.join(cases)}</testsuite></testsuites>")
    (tmp_path / "jax-3.15.1.xml").unlink()
    title, _, first, *_ = script.page(tmp_path).removeprefix(script.HEAD).splitlines()
    assert title == "| | JAX, Keras 3.15.1 |" and first == f"| {feature.name} | ✓ 3 |"


@pytest.mark.neutral
def test_the_pictures_are_those_of_the_results(monkeypatch):
    monkeypatch.syspath_prepend(pages.DOCS)
    import draw_results

    for name, draw in draw_results.PICTURES.items():
        assert (draw_results.IMAGES / name).read_text(encoding="utf-8") == draw(), "run `python docs/draw_results.py`"
    assert "CrossShard" in draw_results.readme()


@pytest.mark.neutral
def test_the_page_of_benchmarks_is_of_the_newest_results(monkeypatch):
    monkeypatch.syspath_prepend(pages.DOCS.parent / "benchmarks")
    import run_all

    assert run_all.PAGE.read_text(encoding="utf-8") == run_all.page(), "run `python benchmarks/run_all.py --page`"
    assert run_all.page().count("<svg") > len(run_all.kept())
    assert "| before, 20" in run_all.page()


@pytest.mark.neutral
def test_the_tables_on_pages_are_of_the_newest_results(monkeypatch):
    monkeypatch.syspath_prepend(pages.DOCS.parent / "benchmarks")
    import tables

    texts = {page: page.read_text(encoding="utf-8") for page in pages.PAGES}
    marked = [name for text in texts.values() for _, name, _ in tables.MARKED.findall(text)]
    assert sorted(marked) == sorted(tables.TABLES)
    stale = [page.name for page, text in texts.items() if tables.page(text) != text]
    assert not stale, "run `python benchmarks/tables.py`"

    changed = re.sub(r"(JAX, 1 replica \| )[\d.]+", r"\g<1>0.01", texts[pages.DOCS / "performance.md"])
    assert tables.page(changed) == texts[pages.DOCS / "performance.md"] != changed


@pytest.mark.neutral
def test_a_run_of_a_benchmark_is_stored_with_all_numbers(monkeypatch, tmp_path, capsys):
    monkeypatch.syspath_prepend(pages.ROOT / "benchmarks")
    import timing

    monkeypatch.setattr(timing, "RESULTS", tmp_path)
    text = "| | ms |\n|---|---|\n| a step, `fit` | 1.20 |\n\nA remark.\n\n```\n8 bytes\n```"
    for _ in range(2):  # the second replaces the first
        timing.report("A step", "python benchmarks/fit.py --replicas 2", text, {"Keras": "3"}, write=True)
    (line,) = (tmp_path / "fit.jsonl").read_text(encoding="utf-8").splitlines()
    assert "1.20" in line
    (run,) = timing.stored()
    assert run["parts"][0] == {"columns": ["", "ms"], "rows": [["a step, `fit`", "1.20"]]}
    page = timing.markdown(run)
    assert capsys.readouterr().out.endswith(page + "\n") and page.endswith(text.replace("| |", "|  |") + "\n")


WIDTH = 92  # characters of code that a page shows at 1280 px (docs/stylesheets/site.css)


@pytest.mark.neutral
def test_no_line_of_code_is_cut_off_on_a_page():
    blocks = [block for page in pages.PAGES if page != pages.README for block in pages.blocks(page)]
    shown = {f"{block.page}, line {block.line}": block.code.splitlines() for block in blocks}
    shown |= {str(f): f.read_text(encoding="utf-8").splitlines() for f in (pages.ROOT / "examples").rglob("*.py")}
    for file in (pages.ROOT / "keras_shardopt").rglob("*.py"):
        lines = re.findall(r"^ +((?:>>>|\.\.\.) .*)$", file.read_text(encoding="utf-8"), re.MULTILINE)
        shown[str(file)] = lines
    assert not [(where, line) for where, lines in shown.items() for line in lines if len(line) > WIDTH]


@pytest.mark.neutral
def test_the_readme_is_short():
    assert len(pages.README.read_text(encoding="utf-8").splitlines()) <= 100


@pytest.mark.neutral
def test_messages_that_troubleshooting_quotes_are_in_the_package():
    package = pages.ROOT / "keras_shardopt"
    sources = "".join(re.sub(r'"\s*\n\s*f?"', "", f.read_text(encoding="utf-8")) for f in package.rglob("*.py"))
    page = (pages.DOCS / "troubleshooting.md").read_text(encoding="utf-8")
    quoted = re.findall(r'^### [^"\n]*"([^\n]+?)"(?: \(|$)', page, re.MULTILINE)
    assert len(quoted) >= 8
    for message in quoted:
        for part in message.split(" ... "):
            assert part in sources, part


# Words that only the authors know, and those of the glossary.
COINED = {
    r"rounds?": "sync step, or repetition",
    r"anchors?": "reference weights",
    r"legs?": "phase",
    r"house|rooms?": "folder",
    r"told|heard": "set by the user; received",
    r"(a|the|each) looks?": "evaluation, or saving",
    r"parts? of (a|the|each|its|one) batch|batch[^.|]{0,20} parts": "virtual replica, micro-batch, or rows",
    r"slow links?": "slow network",
}


def words_of(text):
    """A page without its head, comments, code, targets of links, and tables of numbers."""
    text = re.sub(r"\A---\n.*?\n---\n|^```.*?^```|<!--.*?-->|<svg.*?</svg>", "", text, flags=re.DOTALL | re.MULTILINE)
    return re.sub(r"^(?:    |:::).*$|`[^`]*`|\]\([^)]*\)|\{ #[^}]* \}", "]", text, flags=re.MULTILINE)


@pytest.mark.neutral
def test_the_glossary_defines_each_term_once_and_pages_link_to_it():
    glossary = pages.DOCS / "glossary.md"
    terms = re.findall(r"^### (.+)$", glossary.read_text(encoding="utf-8"), re.MULTILINE)
    assert len(terms) == len(set(terms)) >= 14
    others = {page: page.read_text(encoding="utf-8") for page in pages.PAGES if page != glossary}
    linked = {link for text in others.values() for link in re.findall(r"glossary\.md#([\w-]+)\)", text)}
    assert linked == {term.lower().replace(" ", "-") for term in terms}
    # The old way to define a term: "A *replica* is ..."
    defined = rf"(?<!\*)\*(?:{'|'.join(term.lower() for term in terms)})s?\*(?!\*)"
    assert not {page.name for page, text in others.items() if re.search(defined, text)}


@pytest.mark.neutral
def test_pages_have_no_coined_words():
    found = [
        f"{page.name}: {match[0]!r}, write {better}"
        for page in pages.PAGES
        for word, better in COINED.items()
        for match in re.finditer(rf"\b(?:{word})\b", words_of(page.read_text(encoding="utf-8")), re.IGNORECASE)
    ]
    assert not found, "\n".join(found)
    assert re.search(r"\brounds?\b", words_of("A round ends `a round`.\n"))
    assert not re.search(r"\brounds?\b", words_of("See `round(x)` and [it](a.md#round).\n```python\nround(2)\n```\n"))


# What passes on a text that was made elsewhere, or is for Python only.
PASSED_ON = {
    "backends/torch/process_group.py": 2,
    "checkpoint/backup.py": 1,
    "checkpoint/together.py": 3,
    "compile_for/jax/step.py": 1,
    "data/torch_loader.py": 2,
    "fit/tensorflow/trainer.py": 2,
    "launch/call.py": 1,
    "launch/supervisor.py": 1,
    "classic/steps/jax.py": 1,
    "update/gradient_state.py": 3,
}


@pytest.mark.neutral
def test_the_page_of_messages_has_every_error_and_warning(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(pages.DOCS)
    import messages

    found, elsewhere = messages.read()
    assert collections.Counter(call.partition(":")[0] for call in elsewhere) == PASSED_ON, elsewhere
    assert len(found) > 280 and len({message.code for message in found}) == len(found)
    page = messages.page()
    assert all(f"{{ #{message.code} }}" in page for message in found)

    def raised(function):
        with pytest.raises((TypeError, ValueError)) as error:
            function()
        return " ".join(str(error.value).split())

    for text in (
        raised(
            lambda: ks.CrossShard(keras.optimizers.Adam(gradient_accumulation_steps=2), gradient_accumulation_steps=2)
        ),
        raised(lambda: ks.GradientClipping(ks.CrossShard("adam"), 1.0)),
        raised(lambda: ks.save_model(3, "model.keras")),
        raised(lambda: ks.schedules.PolyDecay(1.0, decay_steps="many")),
        raised(lambda: ks.LossScaling("adam", "Backof")),
    ):
        assert any(message.matches(text) for message in found), text

    (tmp_path / "program.py").write_text(
        'RULE = "All is well. Use it."\ndef f(x):\n    raise OSError(f"{RULE} Not {x}.")\n'
    )
    (only,), _ = messages.read(tmp_path)
    assert only == messages.Message("OSError", "All is well. Use it. Not ….", "program.py")
