.PHONY: test check

# Everything the tests need, and the tests; `bash .ci/test` does the same where make is not installed.
test:
	bash .ci/test

# What a change must pass before it lands.
check:
	bash .ci/run

# Martlet beside RocketMQ on this machine, all loads; about an hour. See docs/performance.md.
.PHONY: bench
bench:
	.venv/bin/python benchmarks/compare.py
