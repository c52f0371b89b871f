module martlet/benchmarks/driver

go 1.19
