"""vLLM's own tests of its API, run unchanged against our server and against `vllm serve` with the same weights.

Run `make peer-tests`. Nothing of vLLM is part of this repository: its source distribution and its CPU build are
installed into the cache, next to the peers of `make bench-peers`.

    __main__ -> columns                one column of results: our server, or vLLM's
                  -> vllm_source       the test files, from vLLM's source distribution
                  -> pytest_plugin     runs inside vLLM's environment and replaces the server that the tests start
             -> comparison             which tests pass only there; the table, as text and as a page
    suites                             the files that apply, and the tests that cannot apply, with reasons
"""
