"""The parts of the job script that are the same for every run: shell text, in the order of its use.
Pure."""

from __future__ import annotations

import signal

from orchestrator.plan.exits import Exit

#: Begins the probe's own lines: what else a node prints (a TaskProlog, a BASH_ENV, a preloaded
#: library) is not read.
MARK = "orch-node"
#: How long a node may take to look at its folders and programs: a file system that hangs does not
#: answer at all.
ANSWER_S = 20

#: Prints a task's position in the allocation, its node's name and network address, and what the
#: node lacks of the run folder ($1), the program that starts Python ($2) and the image ($3). Needs
#: no Python and no files. Each look is a process of its own, because nothing ends the wait of one
#: that looks at a dead mount.
PROBE = f"""\
lacks=
look() {{
  what=$1; shift
  "$@" </dev/null >/dev/null 2>&1 &
  for pause in 0.02 0.2 0.8 1 1 2 5 10; do
    LD_LIBRARY_PATH= LD_PRELOAD= command -p sleep $pause
    kill -0 $! 2>/dev/null || break
  done
  if kill -0 $! 2>/dev/null; then kill -KILL $!; lacks="$lacks $what-within-{ANSWER_S}-s"
  else wait $! || lacks="$lacks $what"
  fi
}}
[ -z "$1" ] || look run-folder [ -r "$1/request.json" ]
[ -z "$2" ] || look program command -v "$2"
[ -z "$3" ] || look image [ -e "$3" ]
address=${{SLURM_TOPOLOGY_ADDR:-$SLURMD_NODENAME}}
printf "\\n{MARK} %s %s %s%s\\n" "$SLURM_NODEID" "$SLURMD_NODENAME" "$address" "$lacks"
"""

#: srun's limits for the step of the probe: a node that cannot even start a shell is not waited for.
#: It starts in a folder that every node has, and PWD and OLDPWD name no other: a shell looks at
#: them before anything else.
PROBE_FLAGS: dict[str, str | int | bool] = {"chdir": "/", "wait": 6 * ANSWER_S}
PROBE_LIMIT = ("timeout", "--kill-after=30", "300")

#: Signals: the notice before the time limit (USR1) goes on to the steps as URG, which all processes
#: ignore but agents (SIGTERM would end the children that a worker needs for its save), again and
#: again, as an agent may just be starting. Workers then save at the next step boundary and exit
#: with 75. For preemption Slurm itself sends all of them SIGTERM. USR2 is a cancel of which no
#: request could be written. Requeueing is decided in `finish` alone. It first asks for the job's
#: state, because `scontrol requeue` would revive a job that is being cancelled; `retry` waits for a
#: controller that restarts. A lost or unhealthy node (74, 76) requeues the job too, `most_faults`
#: times, since Slurm can replace the node. The requeue, excluded nodes and node count go to one
#: scontrol: the requeue ends the script, and a job that had lost nodes would ask only for as many
#: as it kept. `over` marks a job that is not requeued, for `orch status` while Slurm does not
#: answer. Where Slurm itself ends the attempt (`obey`), whether another follows is Slurm's
#: decision. Slurm 24.05 and later requeue a job that was preempted with a GraceTime when it ends,
#: however it ends, and in a later attempt too if the script has requeued it since. `stay_out`
#: forbids that. Such a job is PREEMPTED for Slurm, which is no good end for those that ask for one:
#: if any waits for the job, a run that is done comes back, and leaves at once.
LIFECYCLE = f"""\
times=${{SLURM_RESTART_COUNT:-0}}
job=${{SLURM_ARRAY_JOB_ID:+${{SLURM_ARRAY_JOB_ID}}_$SLURM_ARRAY_TASK_ID}}
job=${{job:-$SLURM_JOB_ID}}
say() {{ printf '%s orch: job %s life %s: %s\\n' "$(date -u +%FT%TZ)" "$job" "$times" "$*" >&2; }}

noticed=
cancelled=
agents=
notice() {{
  say "notice ($1): workers are asked to save"
  if [ -z "$noticed" ] && [ -n "$agents" ] && [ "$1" = USR1 ]; then
    while kill -0 "$agents"; do scancel --signal=URG "$job"; sleep 20; done 2>/dev/null &
  fi
  noticed=$1
}}
trap 'notice USR1' USR1
trap 'cancelled=1; notice USR1' USR2
trap 'notice TERM' TERM

retry() {{ for pause in 1 5 10 20 30 60 60 60; do "$@" && return; sleep $pause; done; return 1; }}
leave() {{ say "code $1$2"; echo "$1" > "$run/slurm/over"; stay_out "$1"; exit "$1"; }}
stay_out() {{
  [ "$times" != 0 ] || scontrol --oneliner show job "$job" | grep -q ' PreemptTime=[0-9]' || return
  if [ "$1" = 0 ]; then
    waiting=$(squeue --noheader --all --states=PENDING --format=%E) || return
    ! printf '%s\\n' "$waiting" | grep -Eq "after(ok|notok|corr):${{job%_*}}[^0-9]" || return
  fi
  scontrol update JobId="$job" Requeue=0
}} >/dev/null 2>&1
obey() {{ say "code $1, ended by Slurm$2"; exit "$1"; }}
requeue() {{
  {{
    echo "requeue $job"
    [ -z "$without" ] || echo "update JobId=$job ExcNodeList=$without"
    [ -z "$full" ] || echo "update JobId=$job NumNodes=$full"
  }} | scontrol --quiet >/dev/null
}}

check_line() {{
  [ "$1" != 0 ] || return 0
  say "error: code $1 of $2"
  holder=$(cat "$run/slurm/owner" 2>/dev/null)
  [ "${{holder:-$job}}" != "$job" ] || {{ mkdir -p "$run/slurm" && echo {int(Exit.CONFIG)} > "$run/slurm/over"; }}
  exit {int(Exit.CONFIG)}
}}

finish() {{
  trap '' USR1 USR2 TERM
  case $1 in
    {int(Exit.RESTART)}) ;;
    {int(Exit.NODE)}|{int(Exit.CAPACITY)})
      echo "$job $times $1" >> "$run/slurm/faults"
      [ "$(wc -l < "$run/slurm/faults")" -le "$most_faults" ] || leave $1 ", after $most_faults of its kind: no more"
      ;;
    {128 + signal.SIGTERM}) obey $1 "" ;;
    *) leave $1 "" ;;
  esac
  asked=$(ls "$run"/intents/*.json 2>/dev/null | tail -n 1)
  if [ -n "$cancelled" ] || grep -qs '"want":"end"' "$asked"; then retry scancel "$job"; leave $1 ", cancelled"; fi
  [ "$times" -lt "$most" ] || leave $1 ", come back $times times: no more"
  state=$(retry squeue --noheader --jobs="$job" --format=%T)
  [ "$state" = RUNNING ] || obey $1 " ($state)"
  without=$(cat "$run/slurm/exclude" 2>/dev/null)
  say "code $1, comes back${{without:+ without $without}}"
  retry requeue || leave $1 ", and the requeue failed"
  trap - TERM
  sleep 300
}}""".splitlines()  # sleep 300: the requeue kills the script meanwhile


#: `module` is a function of the login shell, which the job has not where Slurm could not read it
#: (--get-user-env timed out) or the site's start files leave it to interactive shells.
MODULES = """\
if ! command -v module >/dev/null; then
  for file in "${LMOD_PKG-}/init/bash" "${MODULESHOME-}/init/bash" /etc/profile.d/{lmod,z00_lmod,modules}.sh; do
    [ ! -r "$file" ] || { . "$file" >/dev/null && break; }
  done
fi""".splitlines()


#: One job writes in a run folder: a second one (`sbatch` of the same script) leaves before it
#: writes anything, unless the first has ended. Of several that find it ended, the one whose claim,
#: the link `<owner>.ended`, comes first goes on; the claim of a job that was killed in this moment
#: is claimed in turn. `owner` comes and changes as a whole, so it is empty only if somebody else
#: has made it so. A controller that does not answer is asked for two minutes. Slurm requeues some
#: jobs whose run has ended (`stay_out` says which, and a lost batch node): they leave.
CLAIM_RUN_FOLDER = f"""\
mkdir -p "$run/slurm" || exit 70
ended() {{
  for pause in 1 5 10 20 30 60 0; do
    holds=$([ -z "$1" ] || squeue --noheader --jobs="$1" --format=%T 2>&1) && break
    case $holds in *nvalid\\ job\\ id*) holds=; break ;; esac
    sleep $pause
  done
  [ -z "$holds" ]
}}
take() {{ echo "$job" > "$run/slurm/$job.owner" && "$@" "$run/slurm/$job.owner" "$run/slurm/owner"; }}
[ -e "$run/slurm/owner" ] || take ln 2>/dev/null
rm -f "$run/slurm/$job.owner"
while owner=$(cat "$run/slurm/owner") || exit 70; [ "$owner" != "$job" ]; do
  ended "$owner" || {{ say "the run belongs to job $owner ($holds): this one leaves"; exit {int(Exit.FENCED)}; }}
  claim=$run/slurm/${{owner:-nobody}}.ended
  until ln -sT "$job" "$claim" 2>/dev/null; do
    by=$(readlink "$claim") || [ -e "$claim" ] || exit 70
    [ "$by" != "$job" ] || break
    ended "$by" || {{ sleep 2; continue 2; }}
    claim=$claim.${{by:-nobody}}
  done
  [ "$(cat "$run/slurm/owner")" != "$owner" ] || take mv -f || exit 70
done
[ "$times" = 0 ] || [ ! -s "$run/slurm/over" ] || leave "$(cat "$run/slurm/over")" ", the run had ended before"
""".splitlines()


#: Nodes that lack something. The task `place` decides about them, unless they are all, or this one,
#: where it would run.
CHECK_PROBE = f"""\
lacking=
sound=
here=
while read -r mark _ name _ lacks; do
  [ "$mark" = {MARK} ] || continue
  [ -n "$lacks" ] || {{ sound=1; continue; }}
  what=$lacks
  say "error: node $name lacks: $lacks"
  lacking=$lacking${{lacking:+,}}$name
  [ "$name" != "$SLURMD_NODENAME" ] || here=1
done < "$life.nodes"
[ -z "$lacking" ] || [ -n "$sound" ] || leave {int(Exit.CONFIG)} ", error: no node has what it needs: $what"
if [ -n "$here" ]; then
  known=$(cat "$run/slurm/exclude" 2>/dev/null || echo "$excluded")
  echo "$known${{known:+,}}$lacking" > "$run/slurm/exclude"
  finish {int(Exit.NODE)}
fi""".splitlines()


#: Lets job/takeover.py call `finish` from another node once this script's node is lost.
TAKEOVER_ENTRY = """\
export ORCH_SCRIPT_NODE="${ORCH_SCRIPT_NODE:-$SLURMD_NODENAME}"
[ "${1-}" != finish ] || finish "$2"
""".splitlines()


#: When a node is lost the job keeps the others (--no-kill), and the agents' step goes on. Slurm
#: 22.05 may never see a step end that was on a lost node, so the step is killed half a minute after
#: the run has ended.
END_STUCK_STEP = """\
{
  until [ -e "$run/slurm/ended" ]; do sleep 2; done
  sleep 30; kill "$agents"; sleep 15; kill -KILL "$agents"
} 2>/dev/null &
watch=$!""".splitlines()
