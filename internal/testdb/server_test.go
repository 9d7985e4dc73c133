//go:build unix

package testdb

import (
	"bufio"
	"errors"
	"fmt"
	"io/fs"
	"math/rand/v2"
	"os"
	"os/exec"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

func TestAServerCanBeStoppedKilledAndStartedAgain(t *testing.T) {
	for _, name := range []string{"postgres", "mysql"} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s := Start(t, name, Options{Durable: true})
			db := Open(t, s.kind.driver, s.DSN())
			_, err := db.Exec("CREATE TABLE kept (id INT PRIMARY KEY)")
			require.NoError(t, err)
			for i, end := range []func(){s.Stop, s.Kill, s.Kill} {
				_, err := db.Exec(fmt.Sprintf("INSERT INTO kept VALUES (%d)", i))
				require.NoError(t, err)
				pid := s.PID()
				end()
				require.True(t, gone(pid))
				require.Zero(t, s.PID())
				require.Error(t, db.Ping())
				end() // twice is no harm
				s.Start()
				s.Start()
				require.Equal(t, i+1, queryInt(t, db, "SELECT count(*) FROM kept"))
			}
			require.NoError(t, s.Engine().Open(t).Ping())
		})
	}
}

func TestAServerTakesArgumentsAndEnvironment(t *testing.T) {
	s := Start(t, "postgres", Options{
		Args: []string{"-c", "max_connections=17"}, Env: []string{"TZ=Asia/Tokyo"}, Init: []string{"--wal-segsize=4"},
	})
	db := Open(t, "pgx", s.DSN())
	require.Equal(t, 17, queryInt(t, db, "SELECT current_setting('max_connections')::int"))
	require.Equal(t, 4<<20, queryInt(t, db, "SELECT setting::int FROM pg_settings WHERE name = 'wal_segment_size'"))

	m := Start(t, "mysql", Options{Args: []string{"--max-connections=17"}})
	require.Equal(t, 17, queryInt(t, Open(t, "mysql", m.DSN()), "SELECT @@max_connections"))
}

func TestAServerThatCannotStartSaysWhyAndIsRemoved(t *testing.T) {
	for name, c := range map[string]struct {
		o    Options
		says string
	}{
		"postgres":      {Options{Args: []string{"-c", "no_such_setting=1"}}, "no_such_setting"},
		"postgres init": {Options{Init: []string{"--no-such-option"}}, "no-such-option"},
		"mysql":         {Options{Args: []string{"--no-such-option"}}, "no-such-option"},
	} {
		k := map[string]*kind{"postgres": postgres, "mysql": maria}[strings.Fields(name)[0]]
		if _, err := k.find(); err != nil {
			continue
		}
		tmp, err := os.MkdirTemp("", "locker-cannot-")
		require.NoError(t, err)
		t.Cleanup(func() { os.RemoveAll(tmp) })
		require.NoError(t, os.Chmod(tmp, 0o755))
		t.Setenv("TMPDIR", tmp)
		_, err = start(k, c.o)
		require.ErrorContains(t, err, c.says, name)
		left, err := os.ReadDir(tmp)
		require.NoError(t, err)
		require.Empty(t, left, name)
	}
}

func TestSetClockMovesTheServersClock(t *testing.T) {
	for name, query := range map[string]string{
		"postgres": "SELECT floor(extract(epoch FROM clock_timestamp()))::bigint",
		"mysql":    "SELECT UNIX_TIMESTAMP(SYSDATE())",
	} {
		t.Run(name, func(t *testing.T) {
			s := Start(t, name, Options{Faketime: true})
			db := Open(t, s.kind.driver, s.DSN())
			ahead := func() float64 { return float64(int64(queryInt(t, db, query)) - time.Now().Unix()) }
			require.InDelta(t, 0, ahead(), 2)
			s.SetClock("+1h")
			require.InDelta(t, 3600, ahead(), 2)
			s.SetClock("-3600")
			require.InDelta(t, -3600, ahead(), 2)
		})
	}
}

// However a test process ends, nothing of its servers stays: the one of the process, a private one that was killed and started again,
// one that is stopped, one that is being made.
func TestNothingStaysOfADeadTestProcess(t *testing.T) {
	for _, name := range []string{"postgres", "mysql"} {
		for _, end := range []string{"panic", "exit", "kill", "kill at once", "kill while starting"} {
			t.Run(name+"/"+end, func(t *testing.T) {
				t.Parallel()
				if _, err := map[string]*kind{"postgres": postgres, "mysql": maria}[name].find(); err != nil {
					t.Skip(err)
				}
				cmd := exec.Command(os.Args[0], "-test.run=^TestChild$", "-test.v")
				tmp, err := os.MkdirTemp("", "locker-child-")
				require.NoError(t, err)
				t.Cleanup(func() { os.RemoveAll(tmp) })
				require.NoError(t, os.Chmod(tmp, 0o755)) // the server's account has to get in
				cmd.Env = append(os.Environ(), "TESTDB_CHILD="+name+","+end, "TMPDIR="+tmp)
				out, err := cmd.StdoutPipe()
				require.NoError(t, err)
				require.NoError(t, cmd.Start())
				var pids []int
				for lines := bufio.NewScanner(out); lines.Scan(); {
					var pid int
					if n, _ := fmt.Sscanf(lines.Text(), "server %d", &pid); n == 1 {
						pids = append(pids, pid)
					}
					if strings.HasPrefix(lines.Text(), "ready") && strings.HasPrefix(end, "kill") {
						if end == "kill while starting" {
							time.Sleep(rand.N(time.Second))
						}
						require.NoError(t, cmd.Process.Kill())
					}
				}
				require.Error(t, cmd.Wait(), "it was to end badly")
				if end == "panic" || end == "exit" || end == "kill" {
					require.Len(t, pids, 2)
				}
				require.Eventually(t, func() bool {
					left, err := os.ReadDir(tmp)
					for _, pid := range pids {
						if !gone(pid) {
							return false
						}
					}
					return err == nil && len(left) == 0
				}, 20*time.Second, 10*time.Millisecond)
			})
		}
	}
}

// TestChild is the process that TestNothingStaysOfADeadTestProcess starts and sees die.
func TestChild(t *testing.T) {
	name, end, ok := strings.Cut(os.Getenv("TESTDB_CHILD"), ",")
	if !ok {
		t.Skip("only as a child")
	}
	k := map[string]*kind{"postgres": postgres, "mysql": maria}[name]
	if end == "kill at once" || end == "kill while starting" {
		fmt.Println("ready")
		for {
			Start(t, name, Options{})
		}
	}
	shared, err := k.shared()
	require.NoError(t, err)
	private := Start(t, name, Options{})
	private.Kill()
	private.Start()
	if end == "exit" {
		Start(t, name, Options{}).Stop()
	}
	for _, s := range []*Server{shared, private} {
		fmt.Println("server", s.PID(), s.dir)
	}
	fmt.Println("ready")
	switch end {
	case "panic":
		panic("as a test may")
	case "exit":
		os.Exit(3)
	}
	select {}
}

func TestAPrivateServerIsRemovedAtTheTestsEnd(t *testing.T) {
	for _, name := range []string{"postgres", "mysql"} {
		t.Run(name, func(t *testing.T) {
			var pid int
			var dir string
			t.Run("inner", func(t *testing.T) {
				s := Start(t, name, Options{})
				pid, dir = s.PID(), s.dir
			})
			if dir == "" {
				t.Skip("none here")
			}
			require.True(t, gone(pid))
			_, err := os.Stat(dir)
			require.ErrorIs(t, err, fs.ErrNotExist)
		})
	}
}

// gone says whether a process has ended. Where nobody collects orphans, in a container without an init, it stays as a zombie.
func gone(pid int) bool {
	if errors.Is(syscall.Kill(pid, 0), syscall.ESRCH) {
		return true
	}
	stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	return err == nil && strings.Contains(string(stat), ") Z ")
}
