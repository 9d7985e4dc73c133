package lockertest

import (
	"context"
	"errors"
	"os"
	"os/exec"
	"strings"
	"testing"
	"time"

	"github.com/locker-go/locker"
)

// What Run says is looked at from outside, because a test that fails cannot pass.
func TestRunReports(t *testing.T) {
	const child = "LOCKERTEST_CHILD"
	children := map[string]func(*testing.T){
		"fails": func(t *testing.T) {
			m := newTestMemory()
			Run(t, func(*testing.T) locker.Locker {
				return hooked{testMemory: m, release: func(ctx context.Context, rec locker.Record) error {
					_, err := m.ForceRelease(ctx, rec.Resource)
					return err
				}}
			})
		},
		"hangs": func(t *testing.T) {
			m := newTestMemory()
			Run(t, func(*testing.T) locker.Locker {
				return hooked{testMemory: m, release: func(context.Context, locker.Record) error { hangHere(); return nil }}
			})
		},
		"excepts": func(t *testing.T) {
			m := newTestMemory()
			Run(t, func(*testing.T) locker.Locker { return struct{ locker.Locker }{m} },
				Except("counter", "it takes so long"), Except("ttl-lasts", "so does this"))
		},
		"excepts unknown": func(t *testing.T) {
			Run(t, func(*testing.T) locker.Locker { return NewMemory() }, Except("no-such-case", "why not"))
		},
		"wide": func(t *testing.T) {
			m := &rowMemory{testMemory: newTestMemory(), ttl: wide}
			Run(t, func(*testing.T) locker.Locker { return struct{ locker.Locker }{m} },
				append(m.options(), Except("counter", "it takes so long"), Except("no-overlap", "so would this"))...)
		},
		"narrow": func(t *testing.T) {
			m := &rowMemory{testMemory: newTestMemory(), ttl: narrow}
			Run(t, func(*testing.T) locker.Locker { return struct{ locker.Locker }{m} }, m.options()...)
		},
		"wide, excepts unknown": func(t *testing.T) {
			Run(t, func(*testing.T) locker.Locker { return NewMemory() }, FixedTTL(wide), MovingToken(), Except("no-such-case", "why not"))
		},
		"no ttl": func(t *testing.T) {
			Run(t, func(*testing.T) locker.Locker { return NewMemory() }, FixedTTL(0))
		},
		"cannot start": func(t *testing.T) {
			Run(t, func(t *testing.T) locker.Locker { t.Fatal("no server"); return nil })
		},
	}
	if run := children[os.Getenv(child)]; run != nil {
		run(t)
		return
	}

	for name, want := range map[string]struct {
		fails        bool
		says, unsaid []string
	}{
		"fails": {true, []string{
			"--- FAIL: TestRunReports/release-not-owner",
			"the rule: Only the very grant that a record names is released.",
			"cases.go:",
			"release by another owner: no error, want \"held by another owner or a newer grant\"",
			"--- PASS: TestRunReports/get",
			"--- PASS: TestRunReports/two-lockers",
		}, nil},
		"hangs": {true, []string{
			"--- FAIL: TestRunReports/acquire-held",
			"still running after", "all goroutines:", "hangHere",
			"acquire-held hung; the cases after it were not run",
			"--- PASS: TestRunReports/acquire-free",
		}, []string{"panic: test timed out", "TestRunReports/acquire-again"}},
		"excepts": {false, []string{
			"--- SKIP: TestRunReports/counter", "excepted: it takes so long",
			"--- SKIP: TestRunReports/ttl-lasts",
			"--- SKIP: TestRunReports/batch", "the Locker does not have this optional interface",
			"--- PASS: TestRunReports/two-lockers",
		}, nil},
		"excepts unknown": {true, []string{`lockertest.Except("no-such-case"): there is no such case`}, []string{"acquire-free"}},
		"wide": {false, []string{
			"--- PASS: TestRunReports/acquire-held", "--- PASS: TestRunReports/ttl-accepted",
			"--- SKIP: TestRunReports/counter", "excepted: it takes so long",
			"--- SKIP: TestRunReports/no-overlap", "excepted: so would this",
			"--- SKIP: TestRunReports/batch", "the Locker does not have this optional interface",
			"--- SKIP: TestRunReports/renew-shortens", "a fixed ttl excludes this case",
			"--- SKIP: TestRunReports/ttl-lasts", "needs FixedTTL of less than a minute",
			"--- SKIP: TestRunReports/acquire-expired", "with this ttl it needs an Expirer, which the Locker is not",
		}, []string{"needs FixedTTL of a minute or more"}},
		"narrow": {false, []string{
			"--- PASS: TestRunReports/ttl-lasts", "--- PASS: TestRunReports/no-overlap", "--- PASS: TestRunReports/renew-or-claim",
			"--- SKIP: TestRunReports/renew-shortens", "a fixed ttl excludes this case",
			"--- SKIP: TestRunReports/acquire-expired", "needs FixedTTL of a minute or more",
		}, []string{"needs FixedTTL of less than a minute", "Expirer"}},
		"wide, excepts unknown": {true, []string{`lockertest.Except("no-such-case"): there is no such case`}, []string{"acquire-free"}},
		"no ttl":                {true, []string{"lockertest.FixedTTL: locker: ttl is 0s; it must be at least 1ms"}, []string{"acquire-free"}},
		"cannot start":          {true, []string{"no server"}, []string{"acquire-free"}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			cmd := exec.Command(os.Args[0], "-test.run=^TestRunReports$", "-test.v", "-test.short", "-test.timeout=20s")
			if name == "hangs" {
				cmd.Args = append(cmd.Args, "-test.timeout=4s")
			}
			cmd.Env = append(os.Environ(), child+"="+name)
			out, err := cmd.CombinedOutput()
			if (err != nil) != want.fails {
				t.Errorf("the child ended with %v; should it fail: %v", err, want.fails)
			}
			for _, s := range want.says {
				if !strings.Contains(string(out), s) {
					t.Errorf("not said: %s", s)
				}
			}
			for _, s := range want.unsaid {
				if strings.Contains(string(out), s) {
					t.Errorf("said: %s", s)
				}
			}
			if t.Failed() {
				t.Logf("the child said:\n%s", out)
			}
		})
	}
}

func hangHere() { select {} }

// A case that is given up says nothing any more: its test is over, and a word would be a panic.
func TestAbandonedCaseIsSilent(t *testing.T) {
	r := &recorder{}
	s := &suite{lockers: [2]locker.Locker{NewMemory(), NewMemory()}}
	over, said := make(chan struct{}), make(chan struct{})
	hung := s.run(r, testCase{name: "hangs", run: func(c *check) {
		defer close(said)
		<-over
		c.Fatalf("late")
	}}, 10*time.Millisecond)
	close(over)
	<-said
	if !hung || len(r.failures) != 1 || !strings.Contains(r.failures[0], "still running after 10ms") {
		t.Errorf("hung: %v, failures: %q", hung, r.failures)
	}
}

// The context of a case ends when its time is over, so that a Locker that minds it lets go.
func TestHungCaseIsCancelled(t *testing.T) {
	r := &recorder{}
	s := &suite{lockers: [2]locker.Locker{NewMemory(), NewMemory()}}
	ended := make(chan error, 1)
	s.run(r, testCase{name: "hangs", run: func(c *check) {
		<-c.ctx.Done()
		ended <- c.ctx.Err()
	}}, 10*time.Millisecond)
	if err := <-ended; !errors.Is(err, context.Canceled) {
		t.Error(err)
	}
}

// Names are told from each other by the suite, so they must differ, and be names.
func TestOddNames(t *testing.T) {
	for what, names := range map[string][]string{"odd": oddNames(digits()), "bare": bareNames} {
		seen := make(map[string]bool)
		for _, name := range names {
			if seen[name] {
				t.Errorf("%s: %q is there twice", what, name)
			}
			seen[name] = true
			if err := locker.CheckName("resource", name); err != nil {
				t.Errorf("%s: %q: %v", what, name, err)
			}
		}
	}
	for _, name := range badNames {
		if locker.CheckName("resource", name) == nil {
			t.Errorf("%q is a name", name)
		}
	}
}
