//! Metrics for Prometheus agree with the actual activity.

use std::collections::{BTreeMap, BTreeSet};
use std::process::{Command, Stdio};

use larder_bench::campaign::process::Process;
use serde_json::Value;

use super::memory::Managed;
use super::migration::Moving;
use super::support::{TEST_TIMEOUT, run_tool, temp_dir_on_tmpfs};
use super::{Host, User, fio, free_port, text, until, value_in};
use std::io::Write;

/// Returns the names of all samples, and of all families with their types.
pub(super) fn names(metrics: &str) -> (BTreeSet<String>, BTreeMap<String, String>) {
    let samples = metrics.lines().filter(|line| !line.starts_with('#'));
    let samples = samples.map(|line| line.split([' ', '{']).next().unwrap_or_default().to_owned());
    let types = metrics.lines().filter_map(|line| line.strip_prefix("# TYPE ")?.split_once(' '));
    let types = types.map(|(name, kind)| (name.to_owned(), kind.to_owned()));
    (samples.collect(), types.collect())
}

/// Starts a VM that has every feature, and has done some work.
pub(super) fn busy(user: &User) -> ((Process, Managed, Moving), Host) {
    let vm = user.cached_vm("web");
    let memory = user.memory_with_all("web");
    let moving = user.leaving();
    let uri = user.nbd("web");
    for commands in [["write 0 8M", "flush"], ["read 0 8M", "discard 0 1M"], ["write -z 1M 1M", "read 0 8M"]] {
        let commands = commands.iter().flat_map(|command| ["-c", command]);
        let all: Vec<&str> = ["-f", "raw"].into_iter().chain(commands).chain([uri.as_str()]).collect();
        run_tool("qemu-io", &all);
    }
    let host = user.host(&["--balance-memory", "--memory-reserve", "1MiB"]);
    // The first sample of the host's memory.
    until("what the host has free", || host.value("larder_host_memory_available_bytes"));
    // Sockets that may be a disk's are queried only after the VM has listed its own.
    until("the memory", || host.value("larder_memory_used_bytes{domain=\"web\"}"));
    until("the move", || host.value("larder_migration_round{domain=\"web\",direction=\"leaving\"}"));
    ((vm, memory, moving), host)
}

#[test]
fn promtool_accepts_both_formats() {
    let user = User::new();
    let (_vm, host) = busy(&user);
    let metrics = host.metrics();
    let mut promtool = Command::new("promtool");
    let promtool = promtool.args(["check", "metrics"]).stdin(Stdio::piped());
    let mut promtool = promtool.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn();
    let promtool = promtool.as_mut().expect("promtool; testbed/setup.sh installs what the tests need");
    let mut input = promtool.stdin.take().expect("a pipe");
    input.write_all(metrics.as_bytes()).expect("takes it");
    drop(input);
    let mut said = String::new();
    for stream in [
        &mut promtool.stdout.take().expect("a pipe") as &mut dyn std::io::Read,
        &mut promtool.stderr.take().expect("a pipe"),
    ] {
        stream.read_to_string(&mut said).expect("text");
    }
    let status = promtool.wait().expect("ends");
    assert!(status.success() && said.is_empty(), "{said}");

    let (head, open) = host.get("/metrics", &["Accept: application/openmetrics-text; version=1.0.0"]);
    assert!(head.contains("content-type: application/openmetrics-text; version=1.0.0"), "{head}");
    assert!(open.ends_with("# EOF\n") && !metrics.contains("# EOF"));
    let ((samples, _), (of_open, types)) = (names(&metrics), names(&open));
    assert_eq!(samples, of_open, "both have the same samples");
    for (name, kind) in &types {
        let is_of = |sample: &String| match kind.as_str() {
            "counter" => *sample == format!("{name}_total"),
            "info" => *sample == format!("{name}_info"),
            _ => sample == name || *sample == format!("{name}_count"),
        };
        assert!(samples.iter().any(is_of), "{name}, a {kind}, has no sample");
        let unit = open.lines().find_map(|line| line.strip_prefix(&format!("# UNIT {name} ")));
        let has_one = ["seconds", "bytes", "ratio"].into_iter().find(|unit| name.ends_with(&format!("_{unit}")));
        assert_eq!(unit, has_one, "the unit of {name}");
    }
}

#[test]
fn metrics_match_control_socket() {
    let user = User::new();
    let (_vm, host) = busy(&user);
    let metrics = host.metrics();
    let disk = user.disk("web");
    let of = r#"{domain="web",target_device="vda"}"#;
    for (name, told) in [
        ("larder_disk_read_requests_total", &disk["requests"]["read"]["count"]),
        ("larder_disk_write_bytes_total", &disk["requests"]["write"]["bytes"]),
        ("larder_disk_discard_bytes_total", &disk["requests"]["discard"]["bytes"]),
        ("larder_disk_read_duration_seconds_count", &disk["requests"]["read"]["latency"]["count"]),
        ("larder_disk_size_bytes", &disk["size"]),
        ("larder_cache_capacity_bytes", &disk["cache"]["capacity"]),
        ("larder_cache_occupancy_bytes", &disk["cache"]["occupancy"]),
        ("larder_cache_daily_write_limit_bytes", &disk["cache"]["endurance"]),
        ("larder_prefetch_memory_limit_bytes", &disk["prefetch"]["memory_limit"]),
    ] {
        assert_eq!(value_in(&metrics, &format!("{name}{of}")), told.as_f64(), "{name}");
        assert!(told.as_f64().is_some_and(|value| value > 0.0), "{name} is {told}");
    }
    let with = |more: &str| format!(r#"{{domain="web",target_device="vda",{more}}}"#);
    for (name, more, told) in [
        ("larder_cache_reads_total", r#"result="hit""#, &disk["cache"]["hits"]),
        ("larder_cache_reads_total", r#"result="miss""#, &disk["cache"]["misses"]),
        ("larder_disk_limit", r#"limit="iops-total""#, &disk["limits"]["iops-total"]),
    ] {
        assert_eq!(value_in(&metrics, &format!("{name}{}", with(more))), told.as_f64(), "{name} {more}");
    }
    let sum = value_in(&metrics, &format!("larder_disk_read_duration_seconds_sum{of}")).expect("a sum");
    let told = disk["requests"]["read"]["latency"]["sum_ns"].as_f64().expect("a number") / 1e9;
    assert!((sum - told).abs() < 1e-9, "{sum} {told}");
    assert!(metrics.contains(r#"larder_vm_info{domain="web",uuid="2c9d6f3e-8c54-4d6a-9c0e-5f2b6c1d7a10",version=""#));
}

#[test]
fn documentation_lists_exactly_all_metrics() {
    let user = User::new();
    let (_vm, host) = busy(&user);
    let (_, types) = names(&host.metrics());
    let page = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/metrics.md");
    let page = std::fs::read_to_string(page).expect("is there");
    let rows = page.lines().filter_map(|line| line.strip_prefix("| `larder_")?.split_once('`'));
    let told: BTreeSet<String> = rows.map(|(name, _)| format!("larder_{name}")).collect();
    assert_eq!(told, types.into_keys().collect());
}

/// Returns the single value of a Prometheus query.
fn ask(port: u16, query: &str) -> Option<f64> {
    let url = format!("http://127.0.0.1:{port}/api/v1/query");
    let told = run_tool("curl", &["-sS", "--get", "--data-urlencode", &format!("query={query}"), &url]);
    let told: Value = serde_json::from_str(&told).ok()?;
    told["data"]["result"][0]["value"][1].as_str()?.parse().ok()
}

#[test]
fn prometheus_sums_match_fio() {
    let user = User::new();
    let vms = ["web", "db", "mail", "build"];
    let _vms: Vec<Process> =
        vms.iter().map(|name| if *name == "web" { user.cached_vm(name) } else { user.vm(name) }).collect();
    let host = user.host(&[]);
    let folder = temp_dir_on_tmpfs();
    let config = folder.path().join("prometheus.yml");
    let scrape = format!(
        "global: {{scrape_interval: 1s}}\nscrape_configs:\n- job_name: larder\n  authorization: {{credentials_file: '{}'}}\n  static_configs:\n  - targets: ['{}']\n",
        text(&user.token_file()),
        host.address
    );
    std::fs::write(&config, scrape).expect("writes");
    let port = free_port();
    let mut command = Command::new("nice");
    command.args(["-n", "19", "prometheus"]);
    command.arg(format!("--config.file={}", text(&config)));
    command.arg(format!("--storage.tsdb.path={}", text(&folder.path().join("data"))));
    command.arg(format!("--web.listen-address=127.0.0.1:{port}"));
    let prometheus = Process::start(command).expect("starts");
    prometheus.wait_for("Server is ready", TEST_TIMEOUT).expect("it listens");
    let loads: Vec<_> = vms
        .iter()
        .map(|name| {
            let mut command = fio(&user.nbd(name), &["--rw=randrw", "--bssplit=4k/50:16k/30:64k/20", "--io_size=48m"]);
            command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("fio starts")
        })
        .collect();
    let mut done = [0.0; 4];
    for load in loads {
        let output = load.wait_with_output().expect("ends");
        assert!(output.status.success(), "{output:?}");
        // Other messages of fio come first.
        let said = String::from_utf8_lossy(&output.stdout);
        let told = said.find('{').map_or("", |begin| &said[begin..]);
        let told: Value = serde_json::from_str(told).unwrap_or_else(|error| panic!("{error}: {said}"));
        let of = |kind: &str, what: &str| told["jobs"][0][kind][what].as_f64().expect("a number");
        let all = [of("read", "io_bytes"), of("write", "io_bytes"), of("read", "total_ios"), of("write", "total_ios")];
        done.iter_mut().zip(all).for_each(|(sum, one)| *sum += one);
    }
    let ended = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).expect("after 1970");
    until("a scrape after the load", || {
        ask(port, "min(timestamp(larder_vm_up))").filter(|time| *time > ended.as_secs_f64() + 1.0)
    });
    assert_eq!(ask(port, "sum(larder_vm_up)"), Some(4.0));
    assert_eq!(ask(port, "up"), Some(1.0));
    let queries = ["read_bytes", "write_bytes", "read_requests", "write_requests"];
    for (name, fio) in queries.into_iter().zip(done) {
        let sum = ask(port, &format!("sum(larder_disk_{name}_total)")).expect("a sum");
        println!("{name}: {sum} here, {fio} in fio");
        assert!(fio > 0.0 && (sum - fio).abs() <= 0.01 * fio, "{name}: {sum} here, {fio} in fio");
    }
}
