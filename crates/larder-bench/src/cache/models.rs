//! The part `models`: the published experiment calculated from the models alone, for each assumption about facts that
//! data sheets omit.

use clap::ValueEnum;

use super::Arguments;
use super::closed;
use super::seed::{Latency, SPAN};
use super::sheets::{OPTANE, Programs, QLC, TLC};

pub(super) fn run(arguments: &Arguments) {
    let vms = arguments.vms.iter().copied().max().unwrap_or(0);
    let disk = arguments.disk << 20;
    println!(
        "{vms} VMs, {} % hits, reads, average and 80th percentile, us; in brackets the average of writes. By the effect of a read \
         on a program of the TLC (rows) and of the QLC (columns).\n",
        arguments.hits
    );
    print!("| | TLC |");
    for programs in Programs::value_variants() {
        print!(" QLC {programs:?}, cached | gain, average | gain, P80 |");
    }
    println!("\n|{}", " --- |".repeat(2 + 3 * Programs::value_variants().len()));
    let cell = |outcome: &closed::Outcome| {
        let (reads, writes) = (Latency::of(&outcome.reads), Latency::of(&outcome.writes));
        (
            format!("{:.0}, {:.0} ({:.0})", reads.mean, reads.p80, writes.mean),
            reads,
        )
    };
    for of_tlc in Programs::value_variants() {
        let (text, tlc) = cell(&closed::on_one_drive(TLC.model(*of_tlc), vms, disk, SPAN));
        print!("| {of_tlc:?} | {text} |");
        for of_qlc in Programs::value_variants() {
            let slow = QLC.model(*of_qlc);
            let fast = OPTANE.model(*of_qlc);
            let cached = closed::cached(fast, slow, vms, disk, arguments.hits / 100.0, SPAN);
            let (text, cached) = cell(&cached);
            print!(
                " {text} | {:.2} | {:.2} |",
                tlc.mean / cached.mean,
                tlc.p80 / cached.p80
            );
        }
        println!();
    }
}
