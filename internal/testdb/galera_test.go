//go:build unix

package testdb

import (
	"fmt"
	"os"
	"testing"

	"github.com/stretchr/testify/require"
)

func TestGaleraNodesHaveTheSameDataAndCanComeBack(t *testing.T) {
	var all []*Server
	t.Run("inner", func(t *testing.T) {
		all = Galera(t, 3, Options{Args: []string{"--max-connections=17"}})
		for i, s := range all {
			db := Open(t, "mysql", s.DSN("wsrep_sync_wait=1"))
			require.Equal(t, 17, queryInt(t, db, "SELECT @@max_connections"))
			_, err := db.Exec("CREATE TABLE IF NOT EXISTS things (id INT PRIMARY KEY)")
			require.NoError(t, err)
			_, err = db.Exec(fmt.Sprintf("INSERT INTO things VALUES (%d)", i))
			require.NoError(t, err)
			require.Equal(t, i+1, queryInt(t, db, "SELECT count(*) FROM things"))
		}
		for i, end := range []func(){all[0].Stop, all[1].Kill} {
			end()
			_, err := Open(t, "mysql", all[2].DSN()).Exec(fmt.Sprintf("INSERT INTO things VALUES (%d)", 10+i))
			require.NoError(t, err)
			all[i].Start()
			require.NoError(t, all[i].joined(3))
			require.Equal(t, 4+i, queryInt(t, Open(t, "mysql", all[i].DSN()), "SELECT count(*) FROM things"))
		}
	})
	if all == nil {
		t.Skip("none here")
	}
	for _, s := range all {
		require.NoDirExists(t, s.dir)
	}
}

func TestAGaleraNodeThatCannotStartSaysWhyAndIsRemoved(t *testing.T) {
	c := needGalera(t)
	tmp, err := os.MkdirTemp("", "locker-cannot-")
	require.NoError(t, err)
	t.Cleanup(func() { os.RemoveAll(tmp) })
	require.NoError(t, os.Chmod(tmp, 0o755))
	t.Setenv("TMPDIR", tmp)
	s, err := c.start(Options{})
	require.NoError(t, err)
	c.provider = "/no-such-library"
	_, err = c.start(Options{})
	s.remove()
	require.ErrorContains(t, err, c.provider)
	left, err := os.ReadDir(tmp)
	require.NoError(t, err)
	require.Empty(t, left)
}
