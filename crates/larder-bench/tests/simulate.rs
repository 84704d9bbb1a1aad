//! A short campaign of the simulator on every stack, and that the simulator finds what it is there to find.

use larder_bench::simulate::stack::{STACKS, find};
use larder_bench::simulate::{Summary, simulate};

/// Seeds for each stack; `larder-bench simulate` runs more.
const SEEDS: u64 = 2000;

#[test]
fn every_stack_keeps_the_contract_through_faults_and_crashes() {
    std::thread::scope(|scope| {
        for stack in STACKS {
            scope.spawn(|| {
                for seed in 0..SEEDS {
                    if let Err(finding) = simulate(*stack, seed) {
                        panic!("{finding}");
                    }
                }
            });
        }
    });
}

#[test]
fn a_seed_always_does_the_same() {
    let stack = find("align-throttle").expect("it is registered");
    let run = |seed| {
        let Summary {
            requests,
            stops,
            virtual_time,
        } = simulate(stack, seed).expect("keeps its promises");
        (requests, stops, virtual_time)
    };
    for seed in 0..50 {
        assert_eq!(run(seed), run(seed), "seed {seed}");
    }
}
