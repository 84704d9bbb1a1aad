//! Tables in Markdown: medians over the rounds, and ratios to other servers of the same round, with their spread.

use crate::figures::{median, ratio};
use crate::vhost_user::Series;

/// Prints a row for each workload and server. `grid[server][workload]` has the values; `references` has the servers
/// to compare the others with.
pub(super) fn print(servers: &[String], workloads: &[String], grid: &[Vec<Series>], references: &[usize]) {
    print!("| workload | server | IOPS | CPU us |");
    for reference in references {
        print!(" IOPS x {} |", servers[*reference]);
    }
    println!("\n|{}", " --- |".repeat(4 + references.len()));
    for (column, workload) in workloads.iter().enumerate() {
        for (server, row) in servers.iter().zip(grid) {
            let series = &row[column];
            let (iops, cpu) = (median(&series.iops), median(&series.cpu_us));
            print!("| {workload} | {server} | {iops:.0} | {cpu:.2} |");
            for reference in references {
                let other = &grid[*reference][column];
                match std::ptr::eq(series, other) {
                    true => print!(" |"),
                    false => print!(" {} |", ratio(&series.iops, &other.iops)),
                }
            }
            println!();
        }
    }
    println!();
}
