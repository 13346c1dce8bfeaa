"""What `import keras_shardopt` loads beyond `import keras`."""

import subprocess
import sys

PROGRAM = """
import sys
import keras
before = {name.partition(".")[0] for name in sys.modules}
import keras_shardopt
print(*({name.partition(".")[0] for name in sys.modules} - before - set(sys.stdlib_module_names)))
"""


def test_no_package_but_itself_is_loaded_that_keras_does_not_load():
    run = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True, timeout=120)
    assert run.stdout.split() == ["keras_shardopt"]
