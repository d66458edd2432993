"""One conformance suite per port: the contract's promises, as cases that any implementation can be run through.

Each module (`engine`, `environment`, `reward`, `trainer`, `weights`, `files`, `prompts`, `runtime`, `sandbox`,
`sink`) has a
tuple `CASES` and a harness: a few functions that build the implementation under test and describe what the suite cannot
know about it. No test framework is needed; a case is a function that raises `ConformanceError`. With pytest:

    @pytest.mark.parametrize("case", engine.CASES, ids=str)
    def test_my_engine(case):
        case.run(my_harness())  # a fresh one for every case

A case that does not apply (an engine without sessions, a harness without the hook) raises `NotApplicable`.
"""
