STATICCHECK := honnef.co/go/tools/cmd/staticcheck@v0.8.2

# Every module of the repository: the library's, and those that need more than it does.
MODULES := $(patsubst %/go.mod,%,$(wildcard go.mod */go.mod))
each = set -e; for m in $(patsubst go.mod,.,$(MODULES)); do (cd $$m && $(1)); done

.PHONY: help test test-quick test-engines stress servers vet lint fmt-check tidy cross ci clean

help: ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-12s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

test: ## all tests on all engines, under the race detector; gets the servers if they are missing
	LOCKER_TEST_REQUIRE=postgres,mysql scripts/with-servers.sh go test -race -timeout 20m ./...

test-quick: ## the tests, on the engines that are here
	go test ./...

test-engines: ## the tests that take a cluster (Galera), which the others leave out; a minute or two
	LOCKER_TEST_ENGINES=galera LOCKER_TEST_REQUIRE=galera scripts/with-servers.sh \
		go test -race -v -count=1 -p 1 -timeout 10m -run Galera ./internal/testdb .

stress: ## the tests 20 times over
	LOCKER_TEST_REQUIRE=postgres,mysql scripts/with-servers.sh go test -race -count=20 -timeout 3h ./...

servers: ## install what the tests need (Debian, Ubuntu), quick if it is there
	scripts/with-servers.sh

vet: ## go vet
	@$(call each,go vet ./...)

lint: ## staticcheck, and golangci-lint where it is installed
	@$(call each,go run $(STATICCHECK) ./...)
	@if command -v golangci-lint >/dev/null; then golangci-lint run; fi

fmt-check: ## fail if a file is not as gofmt writes it
	@files=$$(gofmt -l .); if [ -n "$$files" ]; then echo "not gofmt-clean:"; echo "$$files"; exit 1; fi

tidy: ## fail if a go.mod or go.sum is not tidy
	@$(call each,go mod tidy -diff)

# The packages are compiled for every pair; vet compiles the tests as well, and they differ by system only.
cross: ## compile for Linux, macOS and Windows on amd64 and arm64
	@set -e; export CGO_ENABLED=0; for os in linux darwin windows; do \
		for arch in amd64 arm64; do echo "build $$os/$$arch"; GOOS=$$os GOARCH=$$arch go build ./...; done; \
		echo "vet $$os"; GOOS=$$os GOARCH=amd64 go vet ./...; \
	done

ci: fmt-check tidy vet lint cross test ## all of these, as .ci/run does; the tests last, so that their result closes the output

clean: ## remove what the build and the tests leave
	go clean -testcache
	rm -rf bin dist coverage.out *.test *.prof
