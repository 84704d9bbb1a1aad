//! Simulated VMs with working sets. A VM stalls in proportion to the part of its working set that exceeds its budget.
//! It also stalls for a while after memory was taken, because evicted pages are not always unneeded ones.

use proptest::prelude::*;

use super::*;

const MIB: u64 = 1 << 20;
const GIB: u64 = 1 << 30;

/// Stall of a VM whose whole working set is evicted.
const FULL_STALL: f64 = 0.9;

#[derive(Clone, Debug)]
struct Vm {
    bounds: BudgetBounds,
    size: u64,
    budget: u64,
    used: u64,
    working_set: u64,
    /// Stall from pages that were taken although they were needed.
    disturbed: f64,
    is_responding: bool,
}

impl Vm {
    fn new(size: u64, [min, low, high, max]: [u64; 4], budget: u64, working_set: u64) -> Self {
        Self {
            bounds: BudgetBounds { min, low, high, max },
            size,
            budget,
            used: budget.min(size),
            working_set,
            disturbed: 0.0,
            is_responding: true,
        }
    }

    fn with_wide_bounds(size: u64, budget: u64, working_set: u64) -> Self {
        Self::new(size, [size / 16, size / 16, size, size], budget, working_set)
    }

    fn stall(&self) -> f64 {
        let missing = self.working_set.saturating_sub(self.budget) as f64 / self.working_set.max(1) as f64;
        (missing * FULL_STALL + self.disturbed).min(1.0)
    }
}

/// Simulated host with its VMs.
struct Sim {
    balancer: Balancer,
    policy: BalancePolicy,
    total: u64,
    /// Bytes that other processes use.
    used_by_others: u64,
    vms: Vec<Vm>,
    changes: Vec<(usize, BudgetChange)>,
    polls: usize,
}

impl Sim {
    fn new(total: u64, reserve: u64, vms: Vec<Vm>) -> Self {
        let policy = BalancePolicy { reserve, stall: 0.01 };
        Self { balancer: Balancer::new(policy), policy, total, used_by_others: 0, vms, changes: Vec::new(), polls: 0 }
    }

    fn available(&self) -> u64 {
        let used: u64 = self.vms.iter().map(|vm| vm.used).sum();
        self.total.saturating_sub(self.used_by_others + used)
    }

    fn observations(&self) -> Vec<VmObservation> {
        let observation_of = |(index, vm): (usize, &Vm)| VmObservation {
            name: index.to_string(),
            is_responding: vm.is_responding,
            bounds: Some(vm.bounds),
            size: vm.size,
            budget: vm.budget,
            used: vm.used,
            stall: Some(vm.stall()),
            is_stuck: false,
        };
        self.vms.iter().enumerate().map(observation_of).collect()
    }

    /// Polls once, and checks every promise about the decisions.
    fn poll_once(&mut self) {
        let (observations, available) = (self.observations(), self.available());
        let changes = self.balancer.decide(available, &observations);
        let granted: u64 = changes.iter().map(|change| change.to.saturating_sub(change.from)).sum();
        let claimable: u64 = observations.iter().map(|vm| vm.budget.saturating_sub(vm.used)).sum();
        if granted > 0 {
            assert!(granted + claimable + self.policy.reserve <= available, "{changes:?} of {available}");
        }
        let goes_below_low =
            changes.iter().any(|change| change.to < change.from && change.to < self.vms[vm_index(change)].bounds.low);
        for change in &changes {
            let vm = &self.vms[vm_index(change)];
            assert!(vm.is_responding, "who does not answer is left alone: {change:?}");
            assert_eq!(change.from, vm.budget);
            let BudgetBounds { min, max, .. } = vm.bounds;
            assert!(change.to >= min.min(change.from) && change.to <= max.max(change.from), "{change:?} {vm:?}");
            if change.to < change.from {
                assert!(change.stall <= self.policy.stall, "who is short is squeezed: {change:?}");
                let idle = vm.budget.saturating_sub(vm.used);
                let bound = vm.size / 16;
                assert!(change.from - change.to <= bound.max(idle), "too much at a time: {change:?}");
                if change.reason == ChangeReason::Calm {
                    assert!(change.from - change.to <= vm.size / 100, "too much at a time: {change:?}");
                }
            }
        }
        if goes_below_low {
            assert!(available < self.policy.reserve, "{changes:?}");
            let after = |at: usize| {
                changes.iter().find(|change| vm_index(change) == at).map_or(self.vms[at].budget, |change| change.to)
            };
            for (at, vm) in self.vms.iter().enumerate() {
                let may_be_squeezed =
                    vm.is_responding && observations[at].stall.is_some_and(|stall| stall <= self.policy.stall);
                assert!(!may_be_squeezed || after(at) <= vm.bounds.low, "{at} is above its low: {changes:?}");
            }
        }
        for change in changes {
            let vm = &mut self.vms[vm_index(&change)];
            if change.to < change.from {
                // Some of the evicted pages are refaulted at once.
                let idle = vm.budget.saturating_sub(vm.used);
                let share = (change.from - change.to).saturating_sub(idle) as f64 / vm.size as f64;
                vm.disturbed += share * vm.working_set.min(change.from) as f64 / change.from as f64;
            }
            vm.budget = change.to;
            self.changes.push((self.polls, change));
        }
        for vm in &mut self.vms {
            vm.used = vm.budget.min(vm.size);
            vm.disturbed *= 0.3;
        }
        self.polls += 1;
    }

    fn run(&mut self, polls: usize) {
        (0..polls).for_each(|_| self.poll_once());
    }

    /// Returns how often a VM's budget has turned from growing to shrinking or back since a poll.
    fn turns(&self, vm: usize, since: usize) -> usize {
        let of = self.changes.iter().filter(|(poll, change)| *poll >= since && vm_index(change) == vm);
        let ups: Vec<bool> = of.map(|(_, change)| change.to > change.from).collect();
        ups.windows(2).filter(|pair| pair[0] != pair[1]).count()
    }
}

fn vm_index(change: &BudgetChange) -> usize {
    change.name.parse().expect("a number")
}

/// Budgets converge to between 98 % and 110 % of the working sets, and then hardly change.
#[test]
fn budgets_converge_to_working_sets() {
    let vms = vec![
        Vm::with_wide_bounds(4 * GIB, 4 * GIB, GIB),
        Vm::with_wide_bounds(4 * GIB, GIB, 3 * GIB),
        Vm::with_wide_bounds(4 * GIB, 2 * GIB, 2 * GIB),
    ];
    let mut sim = Sim::new(16 * GIB, GIB, vms);
    sim.run(1500);
    for (index, vm) in sim.vms.iter().enumerate() {
        let needed = vm.working_set as f64;
        let ratio = vm.budget as f64 / needed;
        assert!((0.98..1.10).contains(&ratio), "{index}: {ratio} of what it needs");
        let turns = sim.turns(index, 1000);
        assert!(turns <= 2, "{index}: {turns} turns");
    }
}

/// On a full host, budgets follow working sets that swap sizes.
#[test]
fn budgets_follow_swapped_working_sets() {
    let vms = vec![Vm::with_wide_bounds(4 * GIB, 3 * GIB, 3 * GIB), Vm::with_wide_bounds(4 * GIB, GIB, GIB)];
    let mut sim = Sim::new(5 * GIB, GIB / 2, vms);
    sim.run(300);
    assert!(sim.vms[0].budget > 2 * sim.vms[1].budget);
    (sim.vms[0].working_set, sim.vms[1].working_set) = (GIB, 3 * GIB);
    sim.run(300);
    assert!(sim.vms[1].budget > 2 * sim.vms[0].budget, "{:?}", sim.vms);
    assert!(sim.vms[1].stall() <= 0.01, "{:?}", sim.vms);
}

/// Below the reserve, memory is taken from VMs that are not short: to `low`, then to `min`.
#[test]
fn reserve_is_restored_from_other_vms() {
    let bounds = [512 * MIB, GIB, 2 * GIB, 4 * GIB];
    let mut vms = vec![Vm::new(4 * GIB, bounds, 2 * GIB, GIB / 4); 3];
    vms[1].working_set = 3 * GIB;
    let mut sim = Sim::new(8 * GIB, GIB, vms);
    sim.used_by_others = 3 * GIB;
    sim.run(1);
    // A VM that is short keeps its budget.
    assert!(
        sim.changes.iter().all(|(_, change)| change.reason == ChangeReason::Reserve && change.name != "1"),
        "{:?}",
        sim.changes
    );
    sim.run(60);
    assert!(sim.available() >= GIB || sim.vms[0].budget == 512 * MIB, "{:?}", sim.vms);
    assert!(sim.vms[0].budget >= GIB && sim.vms[2].budget >= GIB, "{:?}", sim.vms);
    sim.used_by_others = 5 * GIB;
    sim.run(60);
    assert_eq!(sim.vms[0].budget, 512 * MIB, "{:?}", sim.vms);
    assert_eq!(sim.vms[2].budget, 512 * MIB, "{:?}", sim.vms);
    assert!(sim.vms[1].budget >= 2 * GIB, "{:?}", sim.vms);
}

/// A VM keeps memory beyond its `high` only while no other VM needs it.
#[test]
fn memory_beyond_high_is_reclaimable() {
    let bounds = [GIB / 4, GIB / 2, 2 * GIB, 4 * GIB];
    let vms = vec![Vm::new(4 * GIB, bounds, GIB, 4 * GIB), Vm::new(4 * GIB, bounds, GIB, GIB / 2)];
    let mut sim = Sim::new(6 * GIB, GIB, vms);
    sim.run(200);
    assert!(sim.vms[0].budget > 3 * GIB, "memory is plenty: {:?}", sim.vms);
    sim.vms[0].working_set = 3 * GIB;
    sim.run(20);
    sim.vms[1].working_set = 2 * GIB;
    sim.run(400);
    assert!(sim.vms[1].budget >= 2 * GIB - 64 * MIB, "{:?}", sim.vms);
}

/// No budget changes if it is fixed, at the first poll of its VM, or while the VM gives no answer.
#[test]
fn unadjustable_vms_keep_budgets() {
    let mut balancer = Balancer::new(BalancePolicy { reserve: 0, stall: 0.01 });
    let vm = |name: &str| VmObservation {
        name: name.to_owned(),
        is_responding: true,
        bounds: Some(BudgetBounds { min: MIB, low: MIB, high: GIB, max: GIB }),
        size: GIB,
        budget: GIB / 2,
        used: GIB / 2,
        stall: Some(0.5),
        is_stuck: false,
    };
    let fixed = VmObservation { bounds: None, ..vm("fixed") };
    let silent = VmObservation { is_responding: false, ..vm("silent") };
    let new = VmObservation { stall: None, ..vm("new") };
    for _ in 0..20 {
        let all = [fixed.clone(), silent.clone(), new.clone()];
        assert_eq!(balancer.decide(64 * GIB, &all), []);
    }
    let changes = balancer.decide(64 * GIB, &[vm("new")]);
    assert!(changes.len() == 1 && changes[0].reason == ChangeReason::Short && changes[0].to > changes[0].from);
}

/// Unused budget is taken for another VM at once, but is not granted before it is free.
#[test]
fn idle_budget_is_not_granted_twice() {
    let mut vms = vec![Vm::with_wide_bounds(4 * GIB, 4 * GIB, GIB), Vm::with_wide_bounds(4 * GIB, GIB, 3 * GIB)];
    vms[0].used = GIB;
    let mut balancer = Balancer::new(BalancePolicy { reserve: 0, stall: 0.01 });
    let sim = Sim::new(5 * GIB, 0, vms);
    // All free memory is promised to the first VM.
    let changes = balancer.decide(3 * GIB, &sim.observations());
    assert!(changes.iter().all(|change| change.to < change.from), "{changes:?}");
    assert!(changes.iter().any(|change| change.name == "0" && change.reason == ChangeReason::ForOthers), "{changes:?}");
}

/// Memory that was taken although it was needed is given back, and is tried less and less often.
#[test]
fn harmful_takes_are_returned_and_rarer() {
    // The VM needs exactly its budget.
    let mut sim = Sim::new(16 * GIB, GIB, vec![Vm::with_wide_bounds(4 * GIB, 2 * GIB, 2 * GIB)]);
    sim.run(200);
    let early = sim.changes.iter().filter(|(poll, _)| *poll < 200).count();
    sim.run(2000);
    let late = sim.changes.iter().filter(|(poll, _)| (2000..2200).contains(poll)).count();
    assert!(late < early.max(8), "{early} moves at first, {late} later");
    let backs = sim.changes.iter().filter(|(_, change)| change.reason == ChangeReason::Return).count();
    assert!(backs > 0);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]
    /// No sequence of events breaks a promise; [`Sim::poll_once`] checks them at each poll.
    #[test]
    fn random_events_break_no_promise(
        vms in prop::collection::vec((1_u64..64, [0_u64..=16, 0..=16, 0..=16, 0..=16], 0_u64..=16, 0_u64..=16), 1..6),
        total in 8_u64..512,
        reserve in 0_u64..64,
        changes in prop::collection::vec((0_usize..6, 0_u64..=16, any::<bool>(), 0_u64..300), 0..12),
    ) {
        let unit = 64 * MIB;
        let vms = vms.into_iter().map(|(size, mut bounds, budget, working_set)| {
            bounds.sort_unstable();
            let size = size * unit;
            let bounds = bounds.map(|sixteenths| (size / 16 * sixteenths).max(MIB));
            Vm::new(size, bounds, (size / 16 * budget).clamp(bounds[0], bounds[3]), size / 16 * working_set)
        });
        let mut sim = Sim::new(total * unit, reserve * unit, vms.collect());
        sim.run(60);
        for (vm, working_set, is_responding, others) in changes {
            let count = sim.vms.len();
            let vm = &mut sim.vms[vm % count];
            vm.working_set = vm.size / 16 * working_set;
            vm.is_responding = is_responding;
            sim.used_by_others = others * unit;
            sim.run(60);
        }
    }
}
