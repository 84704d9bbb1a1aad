//! The three drives of the published experiment: what their maker says of them, and the models that follow from it.

use clap::ValueEnum;

use super::closed::{self, Leg, Request, Span};
use super::drive::{BLOCK, Buffer, Model, Nanos, Writes, mixed};

const KIB: u64 = 1 << 10;

/// What is published of a drive: 4 KiB requests at random over all of it, latencies those of one at a time. Where from
/// says `docs/benchmarks.md`.
#[derive(Clone, Copy, Debug)]
struct Sheet {
    read_us: f64,
    write_us: f64,
    read_iops: f64,
    write_iops: f64,
    /// Writes in order, bytes a second.
    write_bandwidth: f64,
    /// Requests in flight at which the IOPS are reached.
    depth: usize,
    /// IOPS of seven reads to three writes, where published.
    mixed_iops: Option<f64>,
}

/// What a read does to a program that has begun, which data sheets do not say.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(super) enum Programs {
    /// Suspends it
    Suspended,
    /// Waits for it, and each page of 16 KiB is a program of its own
    Pages,
    /// Waits for it, and it is a whole word line
    Whole,
}

/// Bytes of a page of flash.
const PAGE: u64 = 16 * KIB;

/// What it takes to suspend a program.
const SUSPEND: Nanos = 25_000;

/// What is not published.
#[derive(Clone, Copy, Debug)]
struct Assumed {
    /// So many that the published IOPS of reads come out.
    units: usize,
    /// What of a request's latency is no unit's.
    overhead_us: f64,
    writes: AssumedWrites,
}

#[derive(Clone, Copy, Debug)]
enum AssumedWrites {
    InPlace,
    Buffered {
        /// Bytes that a unit programs at once.
        word_line: u64,
        /// Bytes that the drive maps at a time.
        mapped: u64,
        buffer: u64,
    },
}

/// One of the drives.
#[derive(Clone, Copy, Debug)]
pub(super) struct Drive {
    pub(super) name: &'static str,
    sheet: Sheet,
    assumed: Assumed,
}

/// The cache: no flash, and written in place. Its latencies are published as under 10 us; reads were measured at 8.9.
pub(super) const OPTANE: Drive = Drive {
    name: "Optane DC P4800X",
    sheet: Sheet {
        read_us: 9.0,
        write_us: 9.8,
        read_iops: 550_000.0,
        write_iops: 500_000.0,
        write_bandwidth: 2.0e9,
        depth: 16,
        mixed_iops: Some(500_000.0),
    },
    assumed: Assumed {
        units: 5,
        overhead_us: 1.15,
        writes: AssumedWrites::InPlace,
    },
};

/// What QLC with a cache is compared with. A word line is three pages of 16 KiB.
pub(super) const TLC: Drive = Drive {
    name: "DC P4510 8 TB (TLC)",
    sheet: Sheet {
        read_us: 77.0,
        write_us: 18.0,
        read_iops: 641_800.0,
        write_iops: 134_500.0,
        write_bandwidth: 3.0e9,
        depth: 256,
        mixed_iops: None,
    },
    assumed: Assumed {
        units: 48,
        overhead_us: 10.0,
        writes: AssumedWrites::Buffered {
            word_line: 48 * KIB,
            mapped: 4 * KIB,
            buffer: 8 << 20,
        },
    },
};

/// What is cached. A word line is four pages of 16 KiB; what is mapped follows from the endurance, which is 4.5 times as
/// high for writes in order.
pub(super) const QLC: Drive = Drive {
    name: "D5-P4320 7.68 TB (QLC)",
    sheet: Sheet {
        read_us: 138.0,
        write_us: 30.0,
        read_iops: 427_000.0,
        write_iops: 36_000.0,
        write_bandwidth: 1.0e9,
        depth: 256,
        mixed_iops: None,
    },
    assumed: Assumed {
        units: 62,
        overhead_us: 10.0,
        writes: AssumedWrites::Buffered {
            word_line: 64 * KIB,
            mapped: 16 * KIB,
            buffer: 16 << 20,
        },
    },
};

pub(super) const ALL: [Drive; 3] = [OPTANE, TLC, QLC];

fn nanos(us: f64) -> Nanos {
    (us * 1e3) as Nanos
}

impl Drive {
    /// Service times follow from the published latencies and IOPS: what a write costs the units is their number over the
    /// IOPS of writes, what a program takes of it follows from writes in order, and the rest is garbage collection.
    pub(super) fn model(&self, programs: Programs) -> Model {
        let Self { sheet, assumed, .. } = self;
        let units = assumed.units as f64;
        let read_us = sheet.read_us - assumed.overhead_us;
        let write_us = units * 1e6 / sheet.write_iops;
        let writes = match assumed.writes {
            AssumedWrites::InPlace => Writes::InPlace(nanos(sheet.write_us - assumed.overhead_us)),
            AssumedWrites::Buffered {
                word_line,
                mapped,
                buffer,
            } => {
                let word_line = match programs {
                    Programs::Pages => PAGE,
                    Programs::Suspended | Programs::Whole => word_line,
                };
                let program_us = units * word_line as f64 * 1e6 / sheet.write_bandwidth;
                let writes_per_program = (word_line / mapped) as f64;
                let reads_first = mapped > BLOCK;
                let read_first_us = if reads_first { read_us } else { 0.0 };
                Writes::Buffered(Buffer {
                    acknowledge: nanos(sheet.write_us),
                    writes_max: (buffer / mapped) as usize,
                    writes_per_program: writes_per_program as usize,
                    program: nanos(program_us),
                    collections: (write_us - read_first_us) * writes_per_program / program_us - 1.0,
                    reads_first,
                    suspend: (programs == Programs::Suspended).then_some(SUSPEND),
                })
            }
        };
        Model {
            units: assumed.units,
            read: nanos(read_us),
            overhead: nanos(assumed.overhead_us),
            writes,
        }
    }
}

/// A published figure, and what the model makes of it.
#[derive(Clone, Copy, Debug)]
pub(super) struct Calibrated {
    pub(super) what: &'static str,
    pub(super) published: f64,
    pub(super) model: f64,
}

/// Long enough for a buffer to fill.
const SPAN: Span = Span {
    from: 1_000_000_000,
    to: 2_000_000_000,
};

/// What the drive's model makes of what is published.
pub(super) fn calibrated(drive: &Drive) -> Vec<Calibrated> {
    // Programs among reads, or reads among programs, are not part of it.
    let model = drive.model(Programs::Whole);
    let with = |depth: usize, writes_of_ten: u64| {
        let mut count = 0;
        closed::run(&[model], depth, SPAN, |_| {
            count += 1;
            let random = mixed(count);
            let write = random % 10 < writes_of_ten;
            let leg = Leg {
                drive: 0,
                write,
                address: random,
            };
            Request {
                legs: [Some(leg), None],
                write,
            }
        })
    };
    let sheet = drive.sheet;
    let mut rows = vec![
        Calibrated {
            what: "read, one at a time, us",
            published: sheet.read_us,
            model: mean_us(&with(1, 0).reads),
        },
        Calibrated {
            what: "write, one at a time, us",
            published: sheet.write_us,
            model: mean_us(&with(1, 10).writes),
        },
        Calibrated {
            what: "reads a second",
            published: sheet.read_iops,
            model: with(sheet.depth, 0).iops,
        },
        Calibrated {
            what: "writes a second",
            published: sheet.write_iops,
            model: with(sheet.depth, 10).iops,
        },
    ];
    if let Some(published) = sheet.mixed_iops {
        rows.push(Calibrated {
            what: "70:30 a second (not fitted)",
            published,
            model: with(sheet.depth, 3).iops,
        });
    }
    rows
}

fn mean_us(values: &[Nanos]) -> f64 {
    values.iter().sum::<Nanos>() as f64 / 1e3 / values.len() as f64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_models_have_the_published_latencies_and_iops() {
        for drive in ALL {
            for row in calibrated(&drive) {
                let off = row.model / row.published - 1.0;
                let may = if row.what.contains("not fitted") { 0.1 } else { 0.02 };
                assert!(off.abs() < may, "{}: {row:?}", drive.name);
            }
        }
    }
}
