# SPDX-License-Identifier: Apache-2.0
"""The demonstration: a real vLLM engine on packed KV blocks, compared with the stock layout.

``python -m repage.demo`` is the program. The modules below it are also what the end-to-end tests
use: `repage.demo.setups` (the models and what is known about them), `repage.demo.checkpoints`
(random weights made on the fly), `repage.demo.launch` and `repage.demo.engine_run` (one engine in
one process), `repage.demo.compare` (exact comparison of two runs).
"""
