"""The parts of the job script that are the same for every run, as shell text in the order of its
use. Pure."""

from __future__ import annotations

import signal

from orchestrator.plan.exits import Exit

#: The first word of the probe's own lines. Other lines that a node prints (a TaskProlog, a
#: BASH_ENV, a preloaded library) are not read.
MARK = "orch-node"
#: Seconds that a node may take to look at its folders and programs. A file system that hangs never
#: answers.
ANSWER_S = 20

#: Prints a task's position in the allocation, its node's name and network address, and what the
#: node lacks of the run folder ($1), the program that starts Python ($2) and the image ($3). It
#: needs neither Python nor files. Each check is a process of its own, because nothing can interrupt
#: a process that waits for a dead mount.
PROBE = f"""\
missing=
check() {{
  item=$1; shift
  "$@" </dev/null >/dev/null 2>&1 &
  for pause in 0.02 0.2 0.8 1 1 2 5 10; do
    LD_LIBRARY_PATH= LD_PRELOAD= command -p sleep $pause
    kill -0 $! 2>/dev/null || break
  done
  if kill -0 $! 2>/dev/null; then kill -KILL $!; missing="$missing $item-within-{ANSWER_S}-s"
  else wait $! || missing="$missing $item"
  fi
}}
[ -z "$1" ] || check run-folder [ -r "$1/request.json" ]
[ -z "$2" ] || check program command -v "$2"
[ -z "$3" ] || check image [ -e "$3" ]
address=${{SLURM_TOPOLOGY_ADDR:-$SLURMD_NODENAME}}
printf "\\n{MARK} %s %s %s%s\\n" "$SLURM_NODEID" "$SLURMD_NODENAME" "$address" "$missing"
"""

#: srun's limits for the step of the probe: the script does not wait for a node that cannot even
#: start a shell. The step starts in a folder that every node has, and PWD and OLDPWD name no other
#: folder, because a shell looks at them before anything else.
PROBE_FLAGS: dict[str, str | int | bool] = {"chdir": "/", "wait": 6 * ANSWER_S}
PROBE_LIMIT = ("timeout", "--kill-after=30", "300")

#: Signals, and what follows the end of an attempt.
#:
#: The signal before the time limit (USR1) is forwarded to the steps as URG, which all processes but
#: the agents ignore: SIGTERM would end children that a worker needs for its save. It is sent
#: repeatedly, because an agent may just be starting. Workers then save at the next step boundary
#: and exit with 75. For preemption Slurm itself sends SIGTERM to all processes. USR2 is a cancel
#: whose request could not be written.
#:
#: `finish` alone decides about a requeue. It first asks for the job's state, because `scontrol
#: requeue` would revive a job that is being cancelled; `retry` waits for a controller that
#: restarts. A lost or unhealthy node (74, 76) requeues the job too, at most `max_node_faults`
#: times, since Slurm can replace the node. Requeue, excluded nodes and node count go to one
#: scontrol: the requeue ends the script, and a job that had lost nodes would ask only for those it
#: kept. Its node count is that of the job's first attempt (`KEEP_NODE_COUNT`). The file `over`
#: marks a job that is not requeued, for `orch status` while Slurm does not answer. Where Slurm
#: itself ends the attempt (`defer_to_slurm`), Slurm decides whether another follows.
#:
#: Slurm 24.05 and later requeue a job that was preempted with a GraceTime when it ends, however it
#: ends, and in a later attempt too if the script has requeued it since. `forbid_requeue` prevents
#: that. Slurm calls such a job PREEMPTED, which does not satisfy jobs that depend on a good end: if
#: any such job waits, a run that is done is requeued once and exits at once.
LIFECYCLE = f"""\
restarts=${{SLURM_RESTART_COUNT:-0}}
job=${{SLURM_ARRAY_JOB_ID:+${{SLURM_ARRAY_JOB_ID}}_$SLURM_ARRAY_TASK_ID}}
job=${{job:-$SLURM_JOB_ID}}
log_line() {{
  printf '%s orch: job %s attempt %s: %s\\n' "$(date -u +%FT%TZ)" "$job" "$restarts" "$*" >&2
}}

received=
cancelled=
agents=
on_signal() {{
  log_line "received $1: asking the workers to save and stop"
  if [ -z "$received" ] && [ -n "$agents" ] && [ "$1" = USR1 ]; then
    while kill -0 "$agents"; do scancel --signal=URG "$job"; sleep 20; done 2>/dev/null &
  fi
  received=$1
}}
trap 'on_signal USR1' USR1
trap 'cancelled=1; on_signal USR1' USR2
trap 'on_signal TERM' TERM

retry() {{ for pause in 1 5 10 20 30 60 60 60; do "$@" && return; sleep $pause; done; return 1; }}
end_run() {{
  log_line "exit code $1$2"
  echo "$1" > "$run/slurm/over"
  forbid_requeue "$1"
  exit "$1"
}}
forbid_requeue() {{
  [ "$restarts" != 0 ] || scontrol --oneliner show job "$job" | grep -q ' PreemptTime=[0-9]' \\
    || return
  if [ "$1" = 0 ]; then
    waiting=$(squeue --noheader --all --states=PENDING --format=%E) || return
    ! printf '%s\\n' "$waiting" | grep -Eq "after(ok|notok|corr):${{job%_*}}[^0-9]" || return
  fi
  scontrol update JobId="$job" Requeue=0
}} >/dev/null 2>&1
defer_to_slurm() {{ log_line "exit code $1, ended by Slurm$2"; exit "$1"; }}
requeue_job() {{
  nodes=$(cat "$run/slurm/nodes" 2>/dev/null || echo "$node_count")
  {{
    echo "requeue $job"
    [ -z "$excluding" ] || echo "update JobId=$job ExcNodeList=$excluding"
    [ -z "$nodes" ] || echo "update JobId=$job NumNodes=$nodes"
  }} | scontrol --quiet >/dev/null
}}

check_setup() {{
  [ "$1" != 0 ] || return 0
  log_line "error: exit code $1 from $2"
  owner=$(cat "$run/slurm/owner" 2>/dev/null)
  if [ "${{owner:-$job}}" = "$job" ]; then
    mkdir -p "$run/slurm" && echo {int(Exit.CONFIG)} > "$run/slurm/over"
  fi
  exit {int(Exit.CONFIG)}
}}

finish() {{
  trap '' USR1 USR2 TERM
  case $1 in
    {int(Exit.RESTART)}) ;;
    {int(Exit.NODE)}|{int(Exit.CAPACITY)})
      echo "$job $restarts $1" >> "$run/slurm/faults"
      [ "$(wc -l < "$run/slurm/faults")" -le "$max_node_faults" ] \\
        || end_run $1 ", gave up after $max_node_faults node faults"
      ;;
    {128 + signal.SIGTERM}) defer_to_slurm $1 "" ;;
    *) end_run $1 "" ;;
  esac
  intent=$(ls "$run"/intents/*.json 2>/dev/null | tail -n 1)
  if [ -n "$cancelled" ] || grep -qs '"want":"end"' "$intent"; then
    retry scancel "$job"
    end_run $1 ", cancelled"
  fi
  [ "$restarts" -lt "$max_requeues" ] || end_run $1 ", gave up after $restarts requeues"
  state=$(retry squeue --noheader --jobs="$job" --format=%T)
  [ "$state" = RUNNING ] || defer_to_slurm $1 " ($state)"
  excluding=$(cat "$run/slurm/exclude" 2>/dev/null)
  log_line "exit code $1, requeueing${{excluding:+, excluding $excluding}}"
  retry requeue_job || end_run $1 ", the requeue failed"
  trap - TERM
  sleep 300
}}""".splitlines()  # sleep 300: the requeue kills the script meanwhile


#: `module` is a function of the login shell. The job lacks it where Slurm could not read it
#: (--get-user-env timed out), or where the site's start files define it in interactive shells only.
MODULES = """\
if ! command -v module >/dev/null; then
  for file in "${LMOD_PKG-}/init/bash" "${MODULESHOME-}/init/bash" \\
    /etc/profile.d/{lmod,z00_lmod,modules}.sh
  do
    [ ! -r "$file" ] || { . "$file" >/dev/null && break; }
  done
fi""".splitlines()


#: One job writes in a run folder: a second one (`sbatch` of the same script) exits before it writes
#: anything, unless the first has ended. Of several that find it ended, the one whose claim, the
#: link `<owner>.ended`, comes first continues; the claim of a job that was killed at this moment is
#: claimed in turn. `owner` is created and replaced as a whole, so it is empty only if somebody else
#: has emptied it. The script asks a controller that does not answer for two minutes. Slurm requeues
#: some jobs whose run has ended (see `forbid_requeue`, and a lost batch node): they exit.
OWN_RUN_FOLDER = f"""\
mkdir -p "$run/slurm" || exit 70
has_ended() {{
  for pause in 1 5 10 20 30 60 0; do
    job_state=$([ -z "$1" ] || squeue --noheader --jobs="$1" --format=%T 2>&1) && break
    case $job_state in *nvalid\\ job\\ id*) job_state=; break ;; esac
    sleep $pause
  done
  [ -z "$job_state" ]
}}
become_owner() {{
  echo "$job" > "$run/slurm/$job.owner" && "$@" "$run/slurm/$job.owner" "$run/slurm/owner"
}}
[ -e "$run/slurm/owner" ] || become_owner ln 2>/dev/null
rm -f "$run/slurm/$job.owner"
while owner=$(cat "$run/slurm/owner") || exit 70; [ "$owner" != "$job" ]; do
  has_ended "$owner" || {{
    log_line "the run belongs to job $owner ($job_state): this job exits"
    exit {int(Exit.FENCED)}
  }}
  claim=$run/slurm/${{owner:-nobody}}.ended
  until ln -sT "$job" "$claim" 2>/dev/null; do
    claimant=$(readlink "$claim") || [ -e "$claim" ] || exit 70
    [ "$claimant" != "$job" ] || break
    has_ended "$claimant" || {{ sleep 2; continue 2; }}
    claim=$claim.${{claimant:-nobody}}
  done
  [ "$(cat "$run/slurm/owner")" != "$owner" ] || become_owner mv -f || exit 70
done
if [ "$restarts" != 0 ] && [ -s "$run/slurm/over" ]; then
  end_run "$(cat "$run/slurm/over")" ", the run had already ended"
fi
""".splitlines()


#: Reads the probe's answers. The task `place` decides about nodes that lack something, unless all
#: of them do, or this node does, where `place` would run.
CHECK_PROBE = f"""\
unfit_nodes=
any_fit=
unfit_here=
while read -r mark _ name _ missing; do
  [ "$mark" = {MARK} ] || continue
  [ -n "$missing" ] || {{ any_fit=1; continue; }}
  last_missing=$missing
  log_line "error: node $name lacks: $missing"
  unfit_nodes=$unfit_nodes${{unfit_nodes:+,}}$name
  [ "$name" != "$SLURMD_NODENAME" ] || unfit_here=1
done < "$attempt.nodes"
if [ -n "$unfit_nodes" ] && [ -z "$any_fit" ]; then
  end_run {int(Exit.CONFIG)} ", error: no node has what the run needs: $last_missing"
fi
if [ -n "$unfit_here" ]; then
  excluded=$(cat "$run/slurm/exclude" 2>/dev/null || echo "$excluded_nodes")
  echo "$excluded${{excluded:+,}}$unfit_nodes" > "$run/slurm/exclude"
  finish {int(Exit.NODE)}
fi""".splitlines()


#: Slurm may start a later attempt on fewer nodes.
KEEP_NODE_COUNT = '[ "$restarts" != 0 ] || echo "$node_count" > "$run/slurm/nodes"'


#: Lets job/takeover.py call `finish` from another node once this script's node is lost.
TAKEOVER_ENTRY = """\
export ORCH_SCRIPT_NODE="${ORCH_SCRIPT_NODE:-$SLURMD_NODENAME}"
[ "${1-}" != finish ] || finish "$2"
""".splitlines()


#: When a node is lost, the job keeps the others (--no-kill) and the agents' step continues. Slurm
#: 22.05 may never see the end of a step that ran on a lost node, so the step is killed half a
#: minute after the run has ended.
END_STUCK_STEP = """\
{
  until [ -e "$run/slurm/ended" ]; do sleep 2; done
  sleep 30; kill "$agents"; sleep 15; kill -KILL "$agents"
} 2>/dev/null &
watchdog=$!""".splitlines()
