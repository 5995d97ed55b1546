"""Chat benchmarks with a judge: AlpacaEval 2, Arena-Hard v0.1 and MT-Bench, computed from files of responses."""
