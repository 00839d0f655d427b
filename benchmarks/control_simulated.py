"""The control plane's decisions on simulated stages: churn, lost and doubled messages; and what a round costs.

    python benchmarks/control_simulated.py [--seeds 5] [--out FILE]

Times are processor time of this process, so that other work on the machine hardly changes them.
"""

import random
import statistics
import time
from collections import defaultdict

from harness import markdown, run

from frostline.control.messages import ControlledStage
from frostline.control.settings import ControlSettings, ControlTenant
from frostline.control.shares import Amounts
from frostline.control.state import ControlState

INF = float("inf")
CAPACITY = Amounts(
    compute_s_per_s=64.0, bytes_per_s=10e9, requests_per_s=50_000.0, requests=20_000.0, memory_bytes=1e12
)


def filled(capacity, demands, weights):
    """Progressive filling, in the plainest way: the exact answer to compare with."""
    share, open_ = dict.fromkeys(demands, 0.0), set(demands)
    while open_ and capacity > 1e-12:
        total = sum(weights[member] for member in open_)
        step = min(capacity / total, *((demands[member] - share[member]) / weights[member] for member in open_), INF)
        for member in open_:
            share[member] += step * weights[member]
        capacity -= step * total
        done = {member for member in open_ if share[member] >= demands[member] * (1 - 1e-12)}
        open_ -= done
        if not done:
            break
    return share


def exact(capacity, stages, weights, resource):
    """The share of each stage: tenants first, then their jobs, then their stages."""
    tree = defaultdict(lambda: defaultdict(dict))
    for stage in stages:
        tree[stage.tenant][stage.job][stage] = min(capacity, stage.demand.row[resource])
    of_tenants = {name: sum(sum(job.values()) for job in jobs.values()) for name, jobs in tree.items()}
    found = {}
    for name, share in filled(capacity, of_tenants, weights).items():
        of_jobs = {job: sum(demands.values()) for job, demands in tree[name].items()}
        for job, part in filled(share, of_jobs, dict.fromkeys(of_jobs, 1.0)).items():
            found |= filled(part, tree[name][job], dict.fromkeys(tree[name][job], 1.0))
    return found


class Simulated:
    """A stage with a demand, some messages under way, and perhaps an end."""

    def __init__(self, number, tenants, chance):
        self.tenant = f"tenant{chance.randrange(tenants)}"
        self.job = f"{self.tenant}-job{chance.randrange(3)}"
        self.controlled = ControlledStage(stage=f"s{number}", job=self.job)
        self.change(chance)

    def change(self, chance):
        fair = [amount / 1000 for amount in CAPACITY.row]
        self.demand = Amounts.of(INF if chance.random() < 0.4 else chance.uniform(0, 3) * part for part in fair)

    @property
    def in_force(self):
        return self.controlled.in_force.row if self.controlled.version else (0.0,) * 5


def settings_of(tenants):
    named = [
        ControlTenant(name=f"tenant{number}", token_sha256=f"{number:064x}", weight=1.0 + number % 4)
        for number in range(tenants)
    ]
    return ControlSettings(capacity=CAPACITY, tenants=tuple(named), max_stages=10_000 * tenants)


def one_round(state, stages, late, now_s, chance, loss, doubled):
    """Each stage reports; a lost report or answer is gone, and a doubled one comes again, late, in the next round."""
    for stage, report in late:
        state.receive(stage.tenant, report, now_s)
    late.clear()
    for stage in chance.sample(stages, len(stages)):
        if heard(state, stage, late, now_s, chance, loss, doubled):  # it may use less, and says so at once
            heard(state, stage, late, now_s, chance, loss, doubled)


def heard(state, stage, late, now_s, chance, loss, doubled):
    """Report, twice if no answer comes; return whether the stage should report again at once."""
    report = stage.controlled.report(stage.demand)
    for _ in range(2):
        if chance.random() < doubled:
            late.append((stage, report))
        if chance.random() < loss:
            continue
        answer = state.receive(stage.tenant, report, now_s)
        if chance.random() >= loss:
            return stage.controlled.take(answer, now_s)
    return False


def over_capacity(stages):
    """The greatest part of a resource that is in force above its capacity."""
    used = [sum(column) for column in zip(*(stage.in_force for stage in stages), strict=True)]
    return max(amount / capacity - 1 for amount, capacity in zip(used, CAPACITY.row, strict=True))


def errors(stages, weights):
    """How far what each stage may use is from its exact share, relative to that; and the worst over tenants."""
    of_stages, of_tenants = [], []
    for resource, capacity in enumerate(CAPACITY.row):
        right = exact(capacity, stages, weights, resource)
        sums = defaultdict(lambda: [0.0, 0.0])
        for stage in stages:
            usable = min(stage.in_force[resource], stage.demand.row[resource])
            if right[stage] > capacity * 1e-9:
                of_stages.append(abs(usable / right[stage] - 1))
            sums[stage.tenant][0] += usable
            sums[stage.tenant][1] += right[stage]
        of_tenants += [abs(usable / share - 1) for usable, share in sums.values() if share > capacity * 1e-9]
    of_stages.sort()
    return {
        "stages_max": of_stages[-1],
        "stages_p99": of_stages[int(0.99 * len(of_stages))],
        "stages_median": of_stages[len(of_stages) // 2],
        "tenants_max": max(of_tenants),
    }


def churned(*, stages, tenants, loss, doubled, rounds, churn, seed):
    """Rounds in which stages come, go and change; then calm rounds, after each of which shares are compared."""
    chance = random.Random(seed)
    settings = settings_of(tenants)
    state = ControlState(settings, now_s=0.0)
    there = [Simulated(number, tenants, chance) for number in range(stages)]
    late, worst, now_s, made = [], -1.0, 0.0, stages
    for _ in range(rounds):
        for place in chance.sample(range(stages), int(churn * stages)):
            gone = there[place]
            if chance.random() < 0.5:  # the others just die, and their share is free after a lease
                state.receive(gone.tenant, gone.controlled.report(gone.demand, has_ended=True), now_s)
            there[place], made = Simulated(made, tenants, chance), made + 1
        for stage in chance.sample(there, stages // 20):
            stage.change(chance)
        one_round(state, there, late, now_s, chance, loss, doubled)
        worst, now_s = max(worst, over_capacity(there)), now_s + settings.round_s
    while any(now_s - record.heard_s < settings.lease_s for record in state.records) and now_s < rounds + 31:
        one_round(state, there, late, now_s, chance, loss, doubled)
        worst, now_s = max(worst, over_capacity(there)), now_s + settings.round_s
    for stage in there:
        stage.change(chance)
    after = []
    for _ in range(10):
        one_round(state, there, late, now_s, chance, loss, doubled)
        worst, now_s = max(worst, over_capacity(there)), now_s + settings.round_s
        after.append(errors(there, settings.weights))
    return {
        "stages": stages,
        "tenants": tenants,
        "loss": loss,
        "doubled": doubled,
        "churn_per_round": churn,
        "rounds_of_churn": rounds,
        "seed": seed,
        "max_over_capacity": worst,
        "errors_after_round": after,
    }


def cost(stages, tenants, repeats):
    """Processor time of a decision over all stages, and of one report with its answer beside the decisions."""
    chance = random.Random(0)
    state = ControlState(settings_of(tenants), now_s=0.0)
    there = [Simulated(number, tenants, chance) for number in range(stages)]
    for stage in there:
        stage.controlled.take(state.receive(stage.tenant, stage.controlled.report(stage.demand), 0.0), 0.0)
    took_s = []
    for repeat in range(repeats):
        for stage in there:
            stage.change(chance)
        before_s = time.process_time()
        state.decide(float(repeat))
        took_s.append(time.process_time() - before_s)
    before_s = time.process_time()
    for stage in there:
        state.receive(stage.tenant, stage.controlled.report(stage.demand), float(repeats))
    message_s = (time.process_time() - before_s) / stages
    took_s.sort()
    return {
        "stages": stages,
        "tenants": tenants,
        "repeats": repeats,
        "decision_s_median": took_s[len(took_s) // 2],
        "decision_s_max": took_s[-1],
        "report_and_answer_s": message_s,
    }


def options(parser):
    parser.add_argument("--stages", type=int, default=1000)
    parser.add_argument("--tenants", type=int, default=100)
    parser.add_argument("--loss", type=float, default=0.1)
    parser.add_argument("--doubled", type=float, default=0.2)
    parser.add_argument("--churn", type=float, default=0.02, help="share of the stages that is replaced in each round")
    parser.add_argument("--churned-rounds", type=int, default=40)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--cost-of", default="1000,10000", help="stages of a decision whose time is taken")


def measure(wanted):
    asked = {name: getattr(wanted, name) for name in ("stages", "tenants", "loss", "doubled", "churn")}
    found = {"simulated": [], "cost": []}
    for seed in range(wanted.seeds):
        found["simulated"].append(churned(**asked, rounds=wanted.churned_rounds, seed=seed))
    found["cost"] = [cost(int(stages), wanted.tenants, 20) for stages in wanted.cost_of.split(",")]
    return found


def table(found):
    last = [run["errors_after_round"][-1] for run in found["simulated"]]
    rows = [
        ["worst stage after ten rounds, from its exact share", f"{max(item['stages_max'] for item in last):.2%}"],
        ["worst tenant", f"{max(item['tenants_max'] for item in last):.2%}"],
        ["most in force above the capacity", f"{max(run['max_over_capacity'] for run in found['simulated']):.1e}"],
    ]
    for item in found["cost"]:
        times = f"{1e3 * item['decision_s_median']:.1f} and {1e3 * item['decision_s_max']:.1f} ms"
        rows.append([f"decision over {item['stages']} stages, median and slowest", times])
    message_s = statistics.median(item["report_and_answer_s"] for item in found["cost"])
    return markdown(["", ""], [*rows, ["a report and its answer", f"{1e6 * message_s:.0f} µs"]])


if __name__ == "__main__":
    quick = {"stages": 60, "tenants": 6, "churned_rounds": 5, "seeds": 1, "cost_of": "100"}
    run(__doc__, measure, quick=quick, options=options, table=table, data=False)
