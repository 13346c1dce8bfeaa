"""A process of a job that the doctor examines: prints its findings, without the child that the command starts."""

import json
import sys

from keras_shardopt.doctor import checks, facts, together

stored = []
together.examine(facts.local(sys.argv[1]), 300, stored.append)
print("FINDINGS", json.dumps(checks.findings(stored[-1])))
