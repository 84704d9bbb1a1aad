//! Options of `larder host`, `status`, `top` and `advise`.

use std::ffi::OsString;
use std::path::PathBuf;
use std::time::Duration;

use clap::Args;
use clap::builder::OsStringValueParser;
use larder_block::ByteLen;
use larder_host::{LISTEN_DEFAULT, ListenAddress};
use larder_vm::listen::{parse_group, parse_huge_mode, parse_user};

use super::Output;

#[derive(Args)]
pub(crate) struct HostArguments {
    /// Address to listen on: an IP address with a port, for other hosts only with --tls-certificates; or the path of
    /// a unix socket, with a / in it
    #[arg(long, value_name = "ADDRESS:PORT|PATH", default_value_t = LISTEN_DEFAULT)]
    pub(crate) listen: ListenAddress,
    /// The mode of a unix socket's file, in octal digits; otherwise 0600
    #[arg(long, value_name = "MODE", value_parser = parse_mode)]
    pub(crate) socket_mode: Option<u32>,
    /// The owner of a unix socket's file, by name or number
    #[arg(long, value_name = "USER", value_parser = parse_user)]
    pub(crate) socket_owner: Option<u32>,
    /// The group of a unix socket's file, by name or number
    #[arg(long, value_name = "GROUP", value_parser = parse_group)]
    pub(crate) socket_group: Option<u32>,
    /// Serve over TLS, with server-cert.pem and server-key.pem from this directory
    #[arg(long, value_name = "DIR")]
    pub(crate) tls_certificates: Option<PathBuf>,
    /// The file with the clients' token in its first line, which other users must not be able to read; otherwise the
    /// first start over TCP creates a token, and each start logs the path of its file
    #[arg(long, value_name = "FILE")]
    pub(crate) token_file: Option<PathBuf>,
    /// Move the budgets of virtual machines whose memory is managed with bounds (larder memory attach --budget-min
    /// and the other bounds) to where they are needed
    #[arg(long)]
    pub(crate) balance_memory: bool,
    /// Amount of the host's memory that stays free
    #[arg(long, value_name = "SIZE", default_value_t = ByteLen::mib(1024), requires = "balance_memory")]
    pub(crate) memory_reserve: ByteLen,
    /// Share of the time that a virtual machine may wait for memory before its budget grows
    #[arg(long, value_name = "PERCENT", default_value = "1%", value_parser = parse_share, requires = "balance_memory")]
    pub(crate) memory_stall: f64,
    /// Interval between two checks of the virtual machines
    #[arg(long, value_name = "TIME", default_value = "6s", value_parser = parse_period, requires = "balance_memory")]
    pub(crate) memory_period: Duration,
}

#[derive(Args)]
pub(crate) struct StatusArguments {
    /// The virtual machine's name, or, with a / in it, the path of a control socket; without it all virtual machines
    #[arg(value_parser = OsStringValueParser::new())]
    pub(crate) vm: Option<OsString>,
    /// Repeat after this many seconds, with the activity of each interval; the first report covers the time since the
    /// server's start
    #[arg(value_parser = OsStringValueParser::new())]
    pub(crate) interval: Option<OsString>,
    /// Number of reports
    #[arg(value_parser = OsStringValueParser::new())]
    pub(crate) count: Option<OsString>,
    /// Print the last events of each disk, the oldest first, also of a disk that hangs: changes of its state, and
    /// messages of its server
    #[arg(long)]
    pub(crate) trace: bool,
    /// Output format: for people, or for programs. JSON for one virtual machine is the answer of its control socket
    /// to GET /v1/disks, or to GET /v1/trace with --trace; with an interval each report is one line
    #[arg(long, default_value = "text")]
    pub(crate) output: Output,
}

#[derive(Args)]
pub(crate) struct TopArguments {
    /// Print the activity, as `larder status` at intervals, instead of the interactive display
    #[arg(long, short)]
    pub(crate) batch: bool,
    /// Seconds between two updates
    #[arg(long, short, value_name = "SECONDS", default_value = "1", value_parser = parse_delay)]
    pub(crate) delay: f64,
    /// Exit after this many updates
    #[arg(long, short = 'n', value_parser = clap::value_parser!(u64).range(1..))]
    pub(crate) count: Option<u64>,
}

#[derive(Args)]
pub(crate) struct AdviseArguments {
    /// Time to measure: 500ms, 10s, 5m or 1h; at least 5s to size a virtual machine's vCPUs
    #[arg(long = "for", value_name = "TIME", default_value = "10s", value_parser = parse_window)]
    pub(crate) window: Duration,
    /// Only report whether one more virtual machine with this much memory would fit; the exit status is 0 if it does,
    /// 1 if not, 3 if only with over-commit or at a stall above the accepted one, 4 if the measurements do not show
    /// it
    #[arg(long, value_name = "SIZE")]
    pub(crate) would_fit: Option<ByteLen>,
    /// Memory that is kept free of virtual machines, in addition to the current use of other processes
    #[arg(long, value_name = "SIZE", default_value_t = ByteLen::mib(1024))]
    pub(crate) reserve: ByteLen,
    /// Share of the host's memory that may be active
    #[arg(long, value_name = "PERCENT", default_value = "80%", value_parser = parse_share)]
    pub(crate) active_share: f64,
    /// Total memory that virtual machines may be given, in percent of the host's memory
    #[arg(long, value_name = "PERCENT", default_value = "150%", value_parser = parse_overcommit)]
    pub(crate) overcommit: f64,
    /// Accepted share of the time spent waiting for memory
    #[arg(long, value_name = "PERCENT", default_value = "5%", value_parser = parse_share)]
    pub(crate) stall: f64,
    /// Average time of a disk request above which the disk is reported as slow
    #[arg(long, value_name = "TIME", default_value = "20ms", value_parser = parse_latency)]
    pub(crate) disk_latency: Duration,
    /// Also query this control socket; may be given several times. Those of VMs with a file, of larder disk serve and
    /// of larder memory attach are found automatically
    #[arg(long, value_name = "PATH")]
    pub(crate) control: Vec<PathBuf>,
    /// Output format: for people or for programs
    #[arg(long, default_value = "text")]
    pub(crate) output: Output,
}

fn parse_mode(text: &str) -> Result<u32, String> {
    parse_huge_mode(text).map_err(|_| "give an octal mode that has at least 0600, as in 0660".to_owned())
}

/// Parses a percentage such as `80%` into a share from 0 to 1.
fn parse_share(text: &str) -> Result<f64, String> {
    let share = parse_percent(text).filter(|share| (0.0..=1.0).contains(share));
    share.ok_or_else(|| "give percent from 0% to 100%, as in 80%".to_owned())
}

/// Parses an over-commit percentage into a factor from 1 to 10.
fn parse_overcommit(text: &str) -> Result<f64, String> {
    let share = parse_percent(text).filter(|share| (1.0..=10.0).contains(share));
    share.ok_or_else(|| "give percent from 100% (no over-commit) to 1000%, as in 150%".to_owned())
}

fn parse_percent(text: &str) -> Option<f64> {
    let number = text.strip_suffix('%').unwrap_or(text).trim_end();
    Some(number.parse::<f64>().ok()? / 100.0)
}

fn parse_window(text: &str) -> Result<Duration, String> {
    let window = parse_time(text).filter(|time| (WINDOW_MIN..=WINDOW_MAX).contains(time));
    window.ok_or_else(|| "give a time from 100ms to 24h, as in 500ms, 10s, 5m or 1h".to_owned())
}

fn parse_latency(text: &str) -> Result<Duration, String> {
    let latency = parse_time(text).filter(|time| !time.is_zero() && *time <= LATENCY_MAX);
    latency.ok_or_else(|| "give a time from 1us to 60s, as in 500us or 20ms".to_owned())
}

fn parse_period(text: &str) -> Result<Duration, String> {
    let period = parse_time(text).filter(|time| (WINDOW_MIN..=PERIOD_MAX).contains(time));
    period.ok_or_else(|| "give a time from 100ms to 10m, as in 6s".to_owned())
}

const PERIOD_MAX: Duration = Duration::from_secs(600);

/// Shortest measuring time: a shorter one would cover only a few turns of the scheduler.
const WINDOW_MIN: Duration = Duration::from_millis(100);
const WINDOW_MAX: Duration = Duration::from_secs(24 * 3600);
const LATENCY_MAX: Duration = Duration::from_secs(60);

/// Parses a whole number with its unit: us, ms, s, m or h.
fn parse_time(text: &str) -> Option<Duration> {
    let digits = text.len() - text.trim_start_matches(|c: char| c.is_ascii_digit()).len();
    let (number, unit) = text.split_at(digits);
    let number: u64 = number.parse().ok()?;
    Some(match unit.trim_start() {
        "us" => Duration::from_micros(number),
        "ms" => Duration::from_millis(number),
        "s" => Duration::from_secs(number),
        "m" => Duration::from_secs(number.checked_mul(60)?),
        "h" => Duration::from_secs(number.checked_mul(3600)?),
        _ => return None,
    })
}

fn parse_delay(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(seconds) if (0.1..=86_400.0).contains(&seconds) => Ok(seconds),
        _ => Err("give seconds from 0.1 to 86400".to_owned()),
    }
}
