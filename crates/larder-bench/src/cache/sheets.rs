//! The three drives of the published experiment: the vendor's data, and the models derived from it.

use clap::ValueEnum;

use super::closed::{self, DriveAccess, MeasuredInterval, Request};
use super::drive::{BLOCK, Buffer, Model, Nanos, Writes, mixed};

const KIB: u64 = 1 << 10;

/// Published data of a drive, for random 4 KiB requests over the whole drive; latencies are of one request at a time.
/// `docs/benchmarks.md` lists the sources.
#[derive(Clone, Copy, Debug)]
struct DataSheet {
    read_us: f64,
    write_us: f64,
    read_iops: f64,
    write_iops: f64,
    /// Bandwidth of sequential writes, bytes per second.
    write_bandwidth: f64,
    /// Requests in flight at which the IOPS are reached.
    depth: usize,
    /// IOPS of seven reads to three writes, where published.
    mixed_iops: Option<f64>,
}

/// Effect of a read on a program that has begun, which data sheets do not state.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(super) enum ReadDuringProgram {
    /// The read suspends the program
    Suspended,
    /// The read waits for the program, and each 16 KiB page is programmed separately
    Pages,
    /// The read waits for the program, which covers a whole word line
    Whole,
}

/// Bytes of a flash page.
const PAGE: u64 = 16 * KIB;

/// Time that it takes to suspend a program.
const SUSPEND_NS: Nanos = 25_000;

/// Assumed values, where nothing is published.
#[derive(Clone, Copy, Debug)]
struct AssumedValues {
    /// Number of units, chosen so that the model reaches the published read IOPS.
    units: usize,
    /// Part of a request's latency that occupies no unit.
    overhead_us: f64,
    writes: AssumedWrites,
}

#[derive(Clone, Copy, Debug)]
enum AssumedWrites {
    InPlace,
    Buffered {
        /// Bytes that a unit programs at once.
        word_line_bytes: u64,
        /// Bytes of a mapping unit.
        mapping_unit_bytes: u64,
        buffer_bytes: u64,
    },
}

/// One of the drives.
#[derive(Clone, Copy, Debug)]
pub(super) struct Drive {
    pub(super) name: &'static str,
    sheet: DataSheet,
    assumed: AssumedValues,
}

/// The cache drive: no flash, and written in place. Its latencies are published as under 10 us; reads were measured
/// at 8.9.
pub(super) const OPTANE: Drive = Drive {
    name: "Optane DC P4800X",
    sheet: DataSheet {
        read_us: 9.0,
        write_us: 9.8,
        read_iops: 550_000.0,
        write_iops: 500_000.0,
        write_bandwidth: 2.0e9,
        depth: 16,
        mixed_iops: Some(500_000.0),
    },
    assumed: AssumedValues { units: 5, overhead_us: 1.15, writes: AssumedWrites::InPlace },
};

/// The drive that cached QLC is compared with. A word line is three pages of 16 KiB.
pub(super) const TLC: Drive = Drive {
    name: "DC P4510 8 TB (TLC)",
    sheet: DataSheet {
        read_us: 77.0,
        write_us: 18.0,
        read_iops: 641_800.0,
        write_iops: 134_500.0,
        write_bandwidth: 3.0e9,
        depth: 256,
        mixed_iops: None,
    },
    assumed: AssumedValues {
        units: 48,
        overhead_us: 10.0,
        writes: AssumedWrites::Buffered {
            word_line_bytes: 48 * KIB,
            mapping_unit_bytes: 4 * KIB,
            buffer_bytes: 8 << 20,
        },
    },
};

/// The drive behind the cache. A word line is four pages of 16 KiB. The mapping unit is inferred from the endurance,
/// which is 4.5 times as high for sequential writes.
pub(super) const QLC: Drive = Drive {
    name: "D5-P4320 7.68 TB (QLC)",
    sheet: DataSheet {
        read_us: 138.0,
        write_us: 30.0,
        read_iops: 427_000.0,
        write_iops: 36_000.0,
        write_bandwidth: 1.0e9,
        depth: 256,
        mixed_iops: None,
    },
    assumed: AssumedValues {
        units: 62,
        overhead_us: 10.0,
        writes: AssumedWrites::Buffered {
            word_line_bytes: 64 * KIB,
            mapping_unit_bytes: 16 * KIB,
            buffer_bytes: 16 << 20,
        },
    },
};

pub(super) const ALL: [Drive; 3] = [OPTANE, TLC, QLC];

fn nanos(us: f64) -> Nanos {
    (us * 1e3) as Nanos
}

impl Drive {
    /// Derives the model from the published latencies and IOPS. The unit time of a write is the number of units
    /// divided by the write IOPS. The sequential bandwidth gives a program's share of that time, and the rest is
    /// garbage collection.
    pub(super) fn model(&self, programs: ReadDuringProgram) -> Model {
        let Self { sheet, assumed, .. } = self;
        let units = assumed.units as f64;
        let read_us = sheet.read_us - assumed.overhead_us;
        let write_us = units * 1e6 / sheet.write_iops;
        let writes = match assumed.writes {
            AssumedWrites::InPlace => Writes::InPlace(nanos(sheet.write_us - assumed.overhead_us)),
            AssumedWrites::Buffered {
                word_line_bytes: word_line,
                mapping_unit_bytes: mapped,
                buffer_bytes: buffer,
            } => {
                let word_line = match programs {
                    ReadDuringProgram::Pages => PAGE,
                    ReadDuringProgram::Suspended | ReadDuringProgram::Whole => word_line,
                };
                let program_us = units * word_line as f64 * 1e6 / sheet.write_bandwidth;
                let writes_per_program = (word_line / mapped) as f64;
                let reads_first = mapped > BLOCK;
                let read_first_us = if reads_first { read_us } else { 0.0 };
                Writes::Buffered(Buffer {
                    acknowledge_latency: nanos(sheet.write_us),
                    writes_max: (buffer / mapped) as usize,
                    writes_per_program: writes_per_program as usize,
                    program_time: nanos(program_us),
                    gc_programs_per_program: (write_us - read_first_us) * writes_per_program / program_us - 1.0,
                    read_modify_write: reads_first,
                    suspend_time: (programs == ReadDuringProgram::Suspended).then_some(SUSPEND_NS),
                })
            }
        };
        Model { units: assumed.units, read_time: nanos(read_us), overhead_time: nanos(assumed.overhead_us), writes }
    }
}

/// A published value beside the model's.
#[derive(Clone, Copy, Debug)]
pub(super) struct CalibrationRow {
    pub(super) metric: &'static str,
    pub(super) published: f64,
    pub(super) model: f64,
}

/// Measured interval, long enough for a buffer to fill.
const SPAN: MeasuredInterval = MeasuredInterval { start: 1_000_000_000, end: 2_000_000_000 };

/// Compares a drive's model with its published data.
pub(super) fn calibrate(drive: &Drive) -> Vec<CalibrationRow> {
    // `ReadDuringProgram` has no effect here: no row except the last mixes reads and programs.
    let model = drive.model(ReadDuringProgram::Whole);
    let run_mixed = |depth: usize, writes_of_ten: u64| {
        let mut count = 0;
        closed::run(&[model], depth, SPAN, |_| {
            count += 1;
            let random = mixed(count);
            let write = random % 10 < writes_of_ten;
            let leg = DriveAccess { drive: 0, write, address: random };
            Request { accesses: [Some(leg), None], write }
        })
    };
    let sheet = drive.sheet;
    let mut rows = vec![
        CalibrationRow {
            metric: "read, one at a time, us",
            published: sheet.read_us,
            model: mean_us(&run_mixed(1, 0).read_latencies),
        },
        CalibrationRow {
            metric: "write, one at a time, us",
            published: sheet.write_us,
            model: mean_us(&run_mixed(1, 10).write_latencies),
        },
        CalibrationRow {
            metric: "reads per second",
            published: sheet.read_iops,
            model: run_mixed(sheet.depth, 0).iops,
        },
        CalibrationRow {
            metric: "writes per second",
            published: sheet.write_iops,
            model: run_mixed(sheet.depth, 10).iops,
        },
    ];
    if let Some(published) = sheet.mixed_iops {
        rows.push(CalibrationRow {
            metric: "70:30 mix per second (not fitted)",
            published,
            model: run_mixed(sheet.depth, 3).iops,
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
    fn models_match_published_latencies_and_iops() {
        for drive in ALL {
            for row in calibrate(&drive) {
                let deviation = row.model / row.published - 1.0;
                let tolerance = if row.metric.contains("not fitted") { 0.1 } else { 0.02 };
                assert!(deviation.abs() < tolerance, "{}: {row:?}", drive.name);
            }
        }
    }
}
