//! Simulated VMs with working sets. A VM stalls in proportion to the part of its working set that exceeds its budget.
//! It also stalls for a while after memory was taken, because evicted pages are not always unneeded ones.

use proptest::prelude::*;

use super::*;

const MIB: u64 = 1 << 20;
const GIB: u64 = 1 << 30;

/// Stall of a VM whose whole working set is evicted.
const STALL_OF_ALL: f64 = 0.9;

#[derive(Clone, Debug)]
struct Vm {
    bounds: Bounds,
    size: u64,
    budget: u64,
    used: u64,
    wanted: u64,
    /// Stall from pages that were taken although they were needed.
    disturbed: f64,
    answers: bool,
}

impl Vm {
    fn new(size: u64, [min, low, high, max]: [u64; 4], budget: u64, wanted: u64) -> Self {
        Self {
            bounds: Bounds { min, low, high, max },
            size,
            budget,
            used: budget.min(size),
            wanted,
            disturbed: 0.0,
            answers: true,
        }
    }

    fn free(size: u64, budget: u64, wanted: u64) -> Self {
        Self::new(size, [size / 16, size / 16, size, size], budget, wanted)
    }

    fn stall(&self) -> f64 {
        let missing = self.wanted.saturating_sub(self.budget) as f64 / self.wanted.max(1) as f64;
        (missing * STALL_OF_ALL + self.disturbed).min(1.0)
    }
}

/// Simulated host with its VMs.
struct Sim {
    balancer: Balancer,
    policy: Policy,
    total: u64,
    /// Bytes that other processes use.
    others: u64,
    vms: Vec<Vm>,
    moves: Vec<(usize, Move)>,
    looks: usize,
}

impl Sim {
    fn new(total: u64, reserve: u64, vms: Vec<Vm>) -> Self {
        let policy = Policy { reserve, stall: 0.01 };
        Self {
            balancer: Balancer::new(policy),
            policy,
            total,
            others: 0,
            vms,
            moves: Vec::new(),
            looks: 0,
        }
    }

    fn available(&self) -> u64 {
        let used: u64 = self.vms.iter().map(|vm| vm.used).sum();
        self.total.saturating_sub(self.others + used)
    }

    fn seen(&self) -> Vec<Seen> {
        let of = |(place, vm): (usize, &Vm)| Seen {
            name: place.to_string(),
            answers: vm.answers,
            bounds: Some(vm.bounds),
            size: vm.size,
            budget: vm.budget,
            used: vm.used,
            stall: Some(vm.stall()),
            is_stuck: false,
        };
        self.vms.iter().enumerate().map(of).collect()
    }

    /// Polls once, and checks every promise about the decisions.
    fn look(&mut self) {
        let (seen, available) = (self.seen(), self.available());
        let moves = self.balancer.decide(available, &seen);
        let given: u64 = moves.iter().map(|it| it.to.saturating_sub(it.from)).sum();
        let promised: u64 = seen.iter().map(|vm| vm.budget.saturating_sub(vm.used)).sum();
        if given > 0 {
            assert!(
                given + promised + self.policy.reserve <= available,
                "{moves:?} of {available}"
            );
        }
        let goes_below_low = moves
            .iter()
            .any(|it| it.to < it.from && it.to < self.vms[place(it)].bounds.low);
        for it in &moves {
            let vm = &self.vms[place(it)];
            assert!(vm.answers, "who does not answer is left alone: {it:?}");
            assert_eq!(it.from, vm.budget);
            let Bounds { min, max, .. } = vm.bounds;
            assert!(it.to >= min.min(it.from) && it.to <= max.max(it.from), "{it:?} {vm:?}");
            if it.to < it.from {
                assert!(it.stall <= self.policy.stall, "who is short is squeezed: {it:?}");
                let idle = vm.budget.saturating_sub(vm.used);
                let bound = vm.size / 16;
                assert!(it.from - it.to <= bound.max(idle), "too much at a time: {it:?}");
                if it.why == Why::Calm {
                    assert!(it.from - it.to <= vm.size / 100, "too much at a time: {it:?}");
                }
            }
        }
        if goes_below_low {
            assert!(available < self.policy.reserve, "{moves:?}");
            let after = |at: usize| {
                moves
                    .iter()
                    .find(|it| place(it) == at)
                    .map_or(self.vms[at].budget, |it| it.to)
            };
            for (at, vm) in self.vms.iter().enumerate() {
                let may_be_squeezed = vm.answers && seen[at].stall.is_some_and(|stall| stall <= self.policy.stall);
                assert!(
                    !may_be_squeezed || after(at) <= vm.bounds.low,
                    "{at} is above its low: {moves:?}"
                );
            }
        }
        for it in moves {
            let vm = &mut self.vms[place(&it)];
            if it.to < it.from {
                // Some of the evicted pages are refaulted at once.
                let idle = vm.budget.saturating_sub(vm.used);
                let share = (it.from - it.to).saturating_sub(idle) as f64 / vm.size as f64;
                vm.disturbed += share * vm.wanted.min(it.from) as f64 / it.from as f64;
            }
            vm.budget = it.to;
            self.moves.push((self.looks, it));
        }
        for vm in &mut self.vms {
            vm.used = vm.budget.min(vm.size);
            vm.disturbed *= 0.3;
        }
        self.looks += 1;
    }

    fn run(&mut self, looks: usize) {
        (0..looks).for_each(|_| self.look());
    }

    /// Returns how often a VM's budget has turned from growing to shrinking or back since a poll.
    fn turns(&self, vm: usize, since: usize) -> usize {
        let of = self.moves.iter().filter(|(look, it)| *look >= since && place(it) == vm);
        let ups: Vec<bool> = of.map(|(_, it)| it.to > it.from).collect();
        ups.windows(2).filter(|pair| pair[0] != pair[1]).count()
    }
}

fn place(it: &Move) -> usize {
    it.name.parse().expect("a number")
}

/// Budgets converge to between 98 % and 110 % of the working sets, and then hardly change.
#[test]
fn budgets_converge_to_working_sets() {
    let vms = vec![
        Vm::free(4 * GIB, 4 * GIB, GIB),
        Vm::free(4 * GIB, GIB, 3 * GIB),
        Vm::free(4 * GIB, 2 * GIB, 2 * GIB),
    ];
    let mut sim = Sim::new(16 * GIB, GIB, vms);
    sim.run(1500);
    for (place, vm) in sim.vms.iter().enumerate() {
        let needed = vm.wanted as f64;
        let has = vm.budget as f64 / needed;
        assert!((0.98..1.10).contains(&has), "{place}: {has} of what it needs");
        let turns = sim.turns(place, 1000);
        assert!(turns <= 2, "{place}: {turns} turns");
    }
}

/// On a full host, budgets follow working sets that swap sizes.
#[test]
fn budgets_follow_swapped_working_sets() {
    let vms = vec![Vm::free(4 * GIB, 3 * GIB, 3 * GIB), Vm::free(4 * GIB, GIB, GIB)];
    let mut sim = Sim::new(5 * GIB, GIB / 2, vms);
    sim.run(300);
    assert!(sim.vms[0].budget > 2 * sim.vms[1].budget);
    (sim.vms[0].wanted, sim.vms[1].wanted) = (GIB, 3 * GIB);
    sim.run(300);
    assert!(sim.vms[1].budget > 2 * sim.vms[0].budget, "{:?}", sim.vms);
    assert!(sim.vms[1].stall() <= 0.01, "{:?}", sim.vms);
}

/// Below the reserve, memory is taken from VMs that are not short: to `low`, then to `min`.
#[test]
fn reserve_is_restored_from_other_vms() {
    let bounds = [512 * MIB, GIB, 2 * GIB, 4 * GIB];
    let mut vms = vec![Vm::new(4 * GIB, bounds, 2 * GIB, GIB / 4); 3];
    vms[1].wanted = 3 * GIB;
    let mut sim = Sim::new(8 * GIB, GIB, vms);
    sim.others = 3 * GIB;
    sim.run(1);
    // A VM that is short keeps its budget.
    assert!(
        sim.moves.iter().all(|(_, it)| it.why == Why::Reserve && it.name != "1"),
        "{:?}",
        sim.moves
    );
    sim.run(60);
    assert!(
        sim.available() >= GIB || sim.vms[0].budget == 512 * MIB,
        "{:?}",
        sim.vms
    );
    assert!(sim.vms[0].budget >= GIB && sim.vms[2].budget >= GIB, "{:?}", sim.vms);
    sim.others = 5 * GIB;
    sim.run(60);
    assert_eq!(sim.vms[0].budget, 512 * MIB, "{:?}", sim.vms);
    assert_eq!(sim.vms[2].budget, 512 * MIB, "{:?}", sim.vms);
    assert!(sim.vms[1].budget >= 2 * GIB, "{:?}", sim.vms);
}

/// A VM keeps memory beyond its `high` only while no other VM needs it.
#[test]
fn memory_beyond_high_is_reclaimable() {
    let bounds = [GIB / 4, GIB / 2, 2 * GIB, 4 * GIB];
    let vms = vec![
        Vm::new(4 * GIB, bounds, GIB, 4 * GIB),
        Vm::new(4 * GIB, bounds, GIB, GIB / 2),
    ];
    let mut sim = Sim::new(6 * GIB, GIB, vms);
    sim.run(200);
    assert!(sim.vms[0].budget > 3 * GIB, "memory is plenty: {:?}", sim.vms);
    sim.vms[0].wanted = 3 * GIB;
    sim.run(20);
    sim.vms[1].wanted = 2 * GIB;
    sim.run(400);
    assert!(sim.vms[1].budget >= 2 * GIB - 64 * MIB, "{:?}", sim.vms);
}

/// No budget changes if it is fixed, at the first poll of its VM, or while the VM gives no answer.
#[test]
fn unadjustable_vms_keep_budgets() {
    let mut balancer = Balancer::new(Policy {
        reserve: 0,
        stall: 0.01,
    });
    let vm = |name: &str| Seen {
        name: name.to_owned(),
        answers: true,
        bounds: Some(Bounds {
            min: MIB,
            low: MIB,
            high: GIB,
            max: GIB,
        }),
        size: GIB,
        budget: GIB / 2,
        used: GIB / 2,
        stall: Some(0.5),
        is_stuck: false,
    };
    let fixed = Seen {
        bounds: None,
        ..vm("fixed")
    };
    let silent = Seen {
        answers: false,
        ..vm("silent")
    };
    let new = Seen {
        stall: None,
        ..vm("new")
    };
    for _ in 0..20 {
        let all = [fixed.clone(), silent.clone(), new.clone()];
        assert_eq!(balancer.decide(64 * GIB, &all), []);
    }
    let moves = balancer.decide(64 * GIB, &[vm("new")]);
    assert!(moves.len() == 1 && moves[0].why == Why::Short && moves[0].to > moves[0].from);
}

/// Unused budget is taken for another VM at once, but is not granted before it is free.
#[test]
fn idle_budget_is_not_granted_twice() {
    let mut vms = vec![Vm::free(4 * GIB, 4 * GIB, GIB), Vm::free(4 * GIB, GIB, 3 * GIB)];
    vms[0].used = GIB;
    let mut balancer = Balancer::new(Policy {
        reserve: 0,
        stall: 0.01,
    });
    let sim = Sim::new(5 * GIB, 0, vms);
    // All free memory is promised to the first VM.
    let moves = balancer.decide(3 * GIB, &sim.seen());
    assert!(moves.iter().all(|it| it.to < it.from), "{moves:?}");
    assert!(
        moves.iter().any(|it| it.name == "0" && it.why == Why::ForOthers),
        "{moves:?}"
    );
}

/// Memory that was taken although it was needed is given back, and is tried less and less often.
#[test]
fn harmful_takes_are_returned_and_rarer() {
    // The VM needs exactly its budget.
    let mut sim = Sim::new(16 * GIB, GIB, vec![Vm::free(4 * GIB, 2 * GIB, 2 * GIB)]);
    sim.run(200);
    let early = sim.moves.iter().filter(|(look, _)| *look < 200).count();
    sim.run(2000);
    let late = sim.moves.iter().filter(|(look, _)| (2000..2200).contains(look)).count();
    assert!(late < early.max(8), "{early} moves at first, {late} later");
    let backs = sim.moves.iter().filter(|(_, it)| it.why == Why::GiveBack).count();
    assert!(backs > 0);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]
    /// No sequence of events breaks a promise; [`Sim::look`] checks them at each poll.
    #[test]
    fn random_events_break_no_promise(
        vms in prop::collection::vec((1_u64..64, [0_u64..=16, 0..=16, 0..=16, 0..=16], 0_u64..=16, 0_u64..=16), 1..6),
        total in 8_u64..512,
        reserve in 0_u64..64,
        changes in prop::collection::vec((0_usize..6, 0_u64..=16, any::<bool>(), 0_u64..300), 0..12),
    ) {
        let unit = 64 * MIB;
        let vms = vms.into_iter().map(|(size, mut bounds, budget, wanted)| {
            bounds.sort_unstable();
            let size = size * unit;
            let bounds = bounds.map(|sixteenths| (size / 16 * sixteenths).max(MIB));
            Vm::new(size, bounds, (size / 16 * budget).clamp(bounds[0], bounds[3]), size / 16 * wanted)
        });
        let mut sim = Sim::new(total * unit, reserve * unit, vms.collect());
        sim.run(60);
        for (vm, wanted, answers, others) in changes {
            let count = sim.vms.len();
            let vm = &mut sim.vms[vm % count];
            vm.wanted = vm.size / 16 * wanted;
            vm.answers = answers;
            sim.others = others * unit;
            sim.run(60);
        }
    }
}
