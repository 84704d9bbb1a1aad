//! The part `models`: the published experiment calculated from the models alone, for each assumption about facts that
//! data sheets omit.

use clap::ValueEnum;

use super::Arguments;
use super::closed;
use super::seed::{Latency, SPAN};
use super::sheets::{OPTANE, QLC, ReadDuringProgram, TLC};

pub(super) fn run(arguments: &Arguments) {
    let vms = arguments.vms.iter().copied().max().unwrap_or(0);
    let disk = arguments.disk << 20;
    println!(
        "{vms} VMs, {} % hits, reads, average and 80th percentile, us; in brackets the average of writes. By the effect of a read \
         on a program of the TLC (rows) and of the QLC (columns).\n",
        arguments.hits
    );
    print!("| | TLC |");
    for programs in ReadDuringProgram::value_variants() {
        print!(" QLC {programs:?}, cached | gain, average | gain, P80 |");
    }
    println!("\n|{}", " --- |".repeat(2 + 3 * ReadDuringProgram::value_variants().len()));
    let cell = |outcome: &closed::Outcome| {
        let (reads, writes) = (Latency::of(&outcome.read_latencies), Latency::of(&outcome.write_latencies));
        (format!("{:.0}, {:.0} ({:.0})", reads.mean_us, reads.p80_us, writes.mean_us), reads)
    };
    for tlc_behaviour in ReadDuringProgram::value_variants() {
        let (text, tlc) = cell(&closed::run_on_one_drive(TLC.model(*tlc_behaviour), vms, disk, SPAN));
        print!("| {tlc_behaviour:?} | {text} |");
        for qlc_behaviour in ReadDuringProgram::value_variants() {
            let slow = QLC.model(*qlc_behaviour);
            let fast = OPTANE.model(*qlc_behaviour);
            let cached = closed::cached(fast, slow, vms, disk, arguments.hits / 100.0, SPAN);
            let (text, cached) = cell(&cached);
            print!(" {text} | {:.2} | {:.2} |", tlc.mean_us / cached.mean_us, tlc.p80_us / cached.p80_us);
        }
        println!();
    }
}
