package main

import (
	"os"
	"os/exec"
	"syscall"
	"unsafe"

	"golang.org/x/sys/windows"
)

var alsoPassed []os.Signal

// group is a command in a process group and a job object of its own. A process that it starts before it is in the job is not in it.
type group struct {
	exited  <-chan int
	stopped <-chan syscall.Signal // never

	id  uint32
	job windows.Handle // 0: there is none
	cmd *exec.Cmd
}

func startGroup(cmd *exec.Cmd, _ chan<- os.Signal) (*group, error) {
	cmd.SysProcAttr = &syscall.SysProcAttr{CreationFlags: windows.CREATE_NEW_PROCESS_GROUP}
	if err := cmd.Start(); err != nil {
		return nil, err
	}
	exited := make(chan int, 1)
	g := &group{exited: exited, id: uint32(cmd.Process.Pid), cmd: cmd}
	if job, err := windows.CreateJobObject(nil, nil); err == nil {
		process, err := windows.OpenProcess(windows.PROCESS_SET_QUOTA|windows.PROCESS_TERMINATE, false, g.id)
		if err == nil {
			err = windows.AssignProcessToJobObject(job, process)
			_ = windows.CloseHandle(process)
		}
		if err == nil {
			g.job = job
		} else {
			_ = windows.CloseHandle(job)
		}
	}
	go func() {
		_ = cmd.Wait() // the state says more
		exited <- cmd.ProcessState.ExitCode()
	}()
	return g, nil
}

// terminate: Ctrl-C cannot be sent to one group.
func (g *group) terminate() { _ = windows.GenerateConsoleCtrlEvent(windows.CTRL_BREAK_EVENT, g.id) }

func (g *group) kill() {
	if g.job != 0 {
		_ = windows.TerminateJobObject(g.job, 1)
		return
	}
	_ = g.cmd.Process.Kill()
}

func (g *group) gone() bool {
	if g.job == 0 {
		return true
	}
	var info struct {
		TotalUserTime, TotalKernelTime, ThisPeriodTotalUserTime, ThisPeriodTotalKernelTime int64
		TotalPageFaultCount, TotalProcesses, ActiveProcesses, TotalTerminatedProcesses     uint32
	}
	err := windows.QueryInformationJobObject(g.job, windows.JobObjectBasicAccountingInformation,
		uintptr(unsafe.Pointer(&info)), uint32(unsafe.Sizeof(info)), nil)
	return err == nil && info.ActiveProcesses == 0
}

func (g *group) pass(os.Signal, func() bool) { g.terminate() }

func (g *group) wasStopped(syscall.Signal) bool { return false }

func (g *group) resume() {}

func (g *group) leave() {}

func (g *group) last() {}
