package lockertest_test

import (
	"context"
	"errors"
	"fmt"
	"testing"
	"time"

	"github.com/locker-go/locker"
	"github.com/locker-go/locker/lockertest"
)

// A Locker of one's own is held to the contract by one line in a test.
func ExampleRun() {
	var t *testing.T // func TestConformance(t *testing.T)

	store := lockertest.NewMemory()
	lockertest.Run(t, func(t *testing.T) locker.Locker {
		// A store that is reached over a network gets a pool of connections of its own here, closed with t.Cleanup.
		return store
	})
}

// report is code that a service might have: it takes any Locker.
func report(ctx context.Context, l locker.Locker, owner string) error {
	lock, err := l.Acquire(ctx, "nightly-report", owner, time.Minute)
	if err != nil {
		return err
	}
	defer l.Release(ctx, lock)
	fmt.Println(owner, "writes the report")
	return nil
}

// In a test of such code a Memory stands in for the database.
func ExampleNewMemory() {
	ctx := context.Background()
	locks := lockertest.NewMemory()

	other, err := locks.Acquire(ctx, "nightly-report", "another host", time.Minute)
	if err != nil {
		panic(err)
	}
	var held *locker.HeldError
	if err := report(ctx, locks, "this host"); errors.As(err, &held) {
		fmt.Println("held by", held.Holder.Owner)
	}

	if err := locks.Release(ctx, other); err != nil {
		panic(err)
	}
	if err := report(ctx, locks, "this host"); err != nil {
		panic(err)
	}
	// Output:
	// held by another host
	// this host writes the report
}
