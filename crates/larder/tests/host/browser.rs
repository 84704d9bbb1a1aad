//! The dashboard in a browser, with VMs under load.

use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::{SystemTime, UNIX_EPOCH};

use larder_bench::campaign::process::Process;
use serde_json::Value;

use super::User;
use super::fio;
use super::web_driver::Browser;

const VMS: [&str; 4] = ["web", "db", "mail", "build"];

/// Script that returns all plots of a disk: their titles, and their data.
const PLOTS: &str =
    "return [...document.querySelectorAll('figure:not([hidden])')].map((it) => [it.dataset.title, it.larder()]);";

/// Returns the directory in which screenshots are kept for people.
pub(super) fn pictures() -> PathBuf {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join("../dashboard");
    std::fs::create_dir_all(&folder).expect("a folder");
    folder
}

/// Loads that run until they are killed.
struct Load(Vec<std::process::Child>);

impl Load {
    fn on(user: &User, vms: &[&str]) -> Self {
        let loads = vms.iter().zip(["randrw", "randread", "rw", "randwrite"]).map(|(name, kind)| {
            let rate = format!("--rate_iops={}", 150 + 50 * name.len());
            let rw = format!("--rw={kind}");
            let mut command = fio(&user.nbd(name), &[&rw, "--bs=16k", &rate, "--time_based", "--runtime=3600"]);
            command.stdout(Stdio::null()).stderr(Stdio::null()).spawn().expect("fio starts")
        });
        Self(loads.collect())
    }
}

impl Drop for Load {
    fn drop(&mut self) {
        for load in &mut self.0 {
            let _ = load.kill();
            let _ = load.wait();
        }
    }
}

/// Returns the points of a series, as time and value, without unknown values.
fn series<'a>(plots: &'a Value, title: &str, place: usize) -> Vec<(f64, f64)> {
    let all = plots.as_array().expect("a list").iter();
    let of = all.into_iter().find(|plot| plot[0] == title).unwrap_or_else(|| panic!("no {title} in {plots}"));
    let list = |place: usize| -> &'a Vec<Value> { of[1][place].as_array().expect("a list") };
    let pairs = list(0).iter().zip(list(place));
    pairs.filter_map(|(time, value)| Some((time.as_f64()?, value.as_f64()?))).collect()
}

/// Integrates a plot of a rate: the amount between its first and last point.
fn sum(rates: &[(f64, f64)]) -> f64 {
    rates.windows(2).map(|pair| (pair[1].0 - pair[0].0) * pair[1].1).sum()
}

#[test]
fn plots_show_actual_activity() {
    let user = User::new();
    let _vms: Vec<Process> = VMS
        .iter()
        .map(|name| if ["web", "build"].contains(name) { user.cached_vm(name) } else { user.vm(name) })
        .collect();
    let host = user.host(&[]);
    let browser = Browser::start();
    host.log_in(&browser);
    browser.look(1280, false);
    let load = Load::on(&user, &VMS);

    browser.open(&host.url("/"));
    browser.wait("all VMs with their figures", "
        const rows = [...document.querySelectorAll('.fleet tbody tr')];
        return rows.length === 4 && rows.every((row) => parseFloat(row.querySelector('[data-key=iops]').textContent) > 50);
    ");
    let names = browser.run("return [...document.querySelectorAll('.fleet tbody th')].map((it) => it.textContent);");
    assert_eq!(names, serde_json::json!(["build", "db", "mail", "web"]));
    browser.run("document.querySelector('#search').value = 'WE'; document.querySelector('#search').dispatchEvent(new Event('input'));");
    assert_eq!(browser.run("return document.querySelectorAll('.fleet tbody tr').length;"), 1);
    browser.run("document.querySelector('#search').value = ''; document.querySelector('#search').dispatchEvent(new Event('input'));");
    // Waits for some points of the small plots.
    browser.wait("history", "window.seen = (window.seen || 0) + 1; return window.seen > 100;");
    let folder = pictures();
    for (width, is_dark) in [(1280, false), (1280, true), (390, false), (390, true)] {
        browser.look(width, is_dark);
        let theme = if is_dark { "dark" } else { "light" };
        browser.wait("it is drawn", "return document.querySelectorAll('.fleet tbody tr').length === 4;");
        browser.picture(&folder.join(format!("fleet-{width}-{theme}.png")));
        assert_eq!(overflow(&browser), 0, "at {width}");
        shows(&browser, theme);
    }
    browser.look(1280, true);
    // The theme button cycles through the choices, starting from the system's theme.
    for theme in ["light", "dark", "dark"] {
        browser.run("document.querySelector('#theme').click();");
        shows(&browser, theme);
    }

    browser.look(1280, false);
    for name in VMS {
        browser.open(&host.url(&format!("/#/vm/{name}")));
        let enough = "const data = document.querySelector('figure')?.larder(); return data && data[1].filter((it) => it !== null).length >= 8;";
        browser.wait("eight looks", enough);
        let plots = browser.run(PLOTS);
        let reads = name != "build";
        let writes = ["web", "mail", "build"].contains(&name);
        let has_cache = ["web", "build"].contains(&name);
        for (title, place, is_moving) in [
            ("Requests per second", 1, reads),
            ("Requests per second", 2, writes),
            ("Bandwidth", 1, reads),
            ("Bandwidth", 2, writes),
            ("Read latency", 1, reads),
            ("Read latency", 2, reads),
            ("Write latency", 1, writes),
            ("Write latency", 2, writes),
            ("Hit ratios", 1, has_cache && reads),
            ("Hit ratios", 2, reads),
            ("Where reads come from", 3, name == "db"),
            ("Read-ahead", 1, name == "mail"),
            ("Read-ahead", 2, name == "mail"),
            ("Held by the cache", 1, has_cache),
        ] {
            if title == "Held by the cache" && !has_cache {
                continue;
            }
            let values = series(&plots, title, place);
            let is_shown =
                !values.is_empty() && (title == "Hit ratios" || values.iter().any(|(_, value)| *value > 0.0));
            assert!(!is_moving || is_shown, "{name}: {title} {place}: {values:?}");
        }
        // The plots' sums equal the VM's own counters.
        let kind = if reads { "read" } else { "write" };
        agree(&browser, &host, &user, name, kind);
    }

    browser.open(&host.url("/#/vm/web"));
    browser.wait("a curve with the size marked", "
        const curve = [...document.querySelectorAll('figure:not([hidden])')].find((it) => it.dataset.title === 'Miss ratio by size');
        const data = curve?.larder();
        return data && data[0].length > 1 && data[2] > 0;
    ");
    let told = user.disk("web")["cache"]["capacity"].clone();
    let shown = browser.run(PLOTS);
    let curve = shown.as_array().expect("a list").iter().find(|plot| plot[0] == "Miss ratio by size");
    assert_eq!(curve.expect("is shown")[1][2], told);
    browser.wait("events", "return document.querySelectorAll('.events li').length > 0;");
    browser.wait("twenty looks", "return document.querySelector('figure').larder()[0].length >= 20;");
    for (width, is_dark) in [(1280, false), (1280, true), (390, false), (390, true)] {
        browser.look(width, is_dark);
        let theme = if is_dark { "dark" } else { "light" };
        let fits = "const plot = document.querySelector('.plot'); return plot.querySelector('canvas').clientWidth === Math.floor(plot.clientWidth);";
        browser.wait("plots that fit", fits);
        browser.picture(&folder.join(format!("vm-{width}-{theme}.png")));
        assert_eq!(overflow(&browser), 0, "at {width}");
    }
    drop(load);
    assert_eq!(browser.complaints(), Vec::<Value>::new());
}

/// Waits until the page has this theme.
fn shows(browser: &Browser, theme: &str) {
    let scheme = "return getComputedStyle(document.documentElement).colorScheme";
    browser.wait(theme, &format!("{scheme} === '{theme}';"));
}

/// Returns by how many pixels the page is wider than the screen.
fn overflow(browser: &Browser) -> i64 {
    let overflow = browser.run("return document.documentElement.scrollWidth - document.documentElement.clientWidth;");
    overflow.as_i64().expect("a number")
}

/// Compares a plot's sum between two samples with the difference of the VM's own counters.
fn agree(browser: &Browser, host: &super::Host, user: &User, name: &str, kind: &str) {
    let mut frames = host.follow(&format!("/api/vm/{name}"));
    let mut look = || {
        let count = || user.disk(name)["requests"][kind]["count"].as_u64().expect("a number");
        let (before, now) = (count(), SystemTime::now().duration_since(UNIX_EPOCH).expect("after 1970"));
        loop {
            let frame = frames.next("vm");
            let time = frame["vm"]["time_ms"].as_u64().expect("a time");
            if u128::from(time) > now.as_millis() {
                let told = frame["disks"][0]["counts"][format!("{kind}s")].as_u64().expect("a number");
                let range = before..=count();
                assert!(range.contains(&told), "{name}: {told} {kind}s are told, the VM has counted {range:?}");
                return (time as f64 / 1e3, told as f64);
            }
        }
    };
    let first = look();
    let shown = |time: f64| format!("return document.querySelector('figure').larder()[0].at(-1) >= {time};");
    browser.wait("more looks", &shown(first.0 + 4.0));
    let last = look();
    browser.wait("the last update", &shown(last.0));
    let place = if kind == "read" { 1 } else { 2 };
    let rates = series(&browser.run(PLOTS), "Requests per second", place);
    let between: Vec<(f64, f64)> = rates.into_iter().filter(|(time, _)| (first.0..=last.0).contains(time)).collect();
    let (plotted, counted) = (sum(&between), last.1 - first.1);
    println!("{name}: the plot says {plotted:.0} {kind}s, the VM {counted}");
    assert!(
        (plotted - counted).abs() <= 0.02 * counted,
        "{name}: the plot says {plotted} {kind}s, the VM {counted}: {between:?}"
    );
}

#[test]
fn memory_page_matches_pager() {
    let user = User::new();
    let _web = user.vm("web");
    let memory = user.memory_with_all("web");
    let host = user.host(&[]);
    let browser = Browser::start();
    host.log_in(&browser);
    browser.look(1280, false);
    browser.open(&host.url("/"));
    browser.wait("its memory", "return document.querySelector('[data-key=memory]')?.textContent.includes('MiB');");
    browser.picture(&pictures().join("fleet-memory.png"));
    browser.open(&host.url("/#/vm/web"));
    let plot = |title: &str| {
        format!("[...document.querySelectorAll('#memory figure')].find((it) => it.dataset.title === '{title}')")
    };
    let enough = format!(
        "const data = {}?.larder(); return data && data[1].filter((it) => it !== null).length >= 8;",
        plot("Memory")
    );
    browser.wait("eight looks", &enough);
    let plots = browser.run(PLOTS);
    for (title, place) in [
        ("Memory", 1),
        ("Memory", 2),
        ("Memory", 3),
        ("Memory", 4),
        ("Time lost by waiting for memory", 1),
        ("Faults per second", 1),
        ("Faults per second", 2),
        ("Fault latency", 1),
        ("Fault latency", 4),
        ("Pages per second", 1),
        ("Pages per second", 2),
        ("To and from its disks", 1),
        ("To and from its disks", 2),
    ] {
        let values = series(&plots, title, place);
        assert!(values.iter().any(|(_, value)| *value > 0.0), "{title} {place}: {values:?}");
    }
    for (width, is_dark) in [(1280, false), (1280, true), (390, false)] {
        browser.look(width, is_dark);
        let theme = if is_dark { "dark" } else { "light" };
        browser.picture(&pictures().join(format!("memory-{width}-{theme}.png")));
        assert_eq!(overflow(&browser), 0, "at {width}");
    }
    // Once nothing changes any more, the page shows the pager's values.
    memory.stop();
    let last = |title: &str, place: usize| {
        let last = format!("const it = {}.larder()[{place}]; return it.at(-1);", plot(title));
        browser.run(&last).as_u64()
    };
    super::until("the last figures", || {
        let state = memory.pager.state().expect("answers");
        let told = [state.used, state.resident, state.compressed.used, state.budget];
        (1..).zip(told).all(|(at, told)| last("Memory", at) == Some(told)).then_some(())
    });
    let facts = browser.run("return document.querySelector('#memory .facts').textContent;");
    let facts = facts.as_str().expect("text");
    for words in ["Budget24.0 MiB", "min 20.0 MiB", "web.swap", " a day", " to 1"] {
        assert!(facts.contains(words), "no {words} in {facts}");
    }
    assert_eq!(browser.complaints(), Vec::<Value>::new());
}

/// A page shows that its VM or `larder host` has ended or hangs, and recovers when it is back.
#[test]
fn page_recovers_after_restarts() {
    let user = User::new();
    let mut web = user.vm("web");
    let port = super::free_port();
    let start = || {
        let listen = format!("127.0.0.1:{port}");
        let process = Process::start(user.larder(&["host", "--listen", &listen])).expect("starts");
        process.wait_for(" ready ", super::support::TEST_TIMEOUT).expect("listens");
        process
    };
    let mut host = start();
    let browser = Browser::start();
    browser.log_in(&format!("http://127.0.0.1:{port}"), &user.token());
    browser.open(&format!("http://127.0.0.1:{port}/#/vm/web"));
    let health = |health: &str| format!("return document.querySelector('.badge')?.dataset.health === '{health}';");
    let state = |state: &str| format!("return document.querySelector('#link').dataset.state === '{state}';");
    browser.wait("the VM", &health("up"));
    web.kill();
    browser.wait("it is killed", &health("killed"));
    let web = user.start("web");
    browser.wait("it is back", &health("up"));
    host.kill();
    browser.wait("nobody tells", &state("lost"));
    let _host = start();
    browser.wait("it is told again", &state("live"));
    browser.wait("the VM", &health("up"));
    web.signal(libc::SIGSTOP);
    browser.wait("it is stuck", &health("stuck"));
    browser.picture(&pictures().join("stuck.png"));
    web.signal(libc::SIGCONT);
    browser.wait("it is not", &health("up"));
}

#[test]
fn hostile_texts_are_not_executed() {
    let user = User::new();
    let evil = "<img src=x onerror=\"document.title='run'\">";
    let listener = std::os::unix::net::UnixListener::bind(user.socket("evil.sock")).expect("binds");
    user.own(&user.socket("evil.sock"));
    std::thread::spawn(move || {
        use std::io::{Read, Write};
        for mut client in listener.incoming().flatten() {
            let mut request = [0; 4096];
            let count = client.read(&mut request).unwrap_or_default();
            let request = String::from_utf8_lossy(&request[..count]).into_owned();
            let server = serde_json::json!({"vm": evil, "uuid": evil, "file": null, "version": evil, "pid": 1, "started_ms": u64::MAX});
            let body = match request.starts_with("GET /v1/disks ") {
                true => "{\"disks\": []}".to_owned(),
                false => server.to_string(),
            };
            let _ = write!(client, "HTTP/1.1 200 OK\r\nContent-Length: {}\r\n\r\n{body}", body.len());
        }
    });
    let host = user.host(&[]);
    let browser = Browser::start();
    host.log_in(&browser);
    browser.open(&host.url("/"));
    let shown = browser.wait("its row", "return document.querySelector('.fleet tbody th')?.textContent;");
    assert_eq!(shown, evil);
    browser.run("document.querySelector('.fleet tbody th a').click();");
    let title = browser.wait("its page", "return document.querySelector('article h1')?.textContent;");
    assert_eq!(title, evil);
    browser.wait("what it is", "return document.querySelector('.facts').textContent.includes('onerror');");
    assert_ne!(browser.run("return document.title;"), "run");
    assert_eq!(browser.run("return document.querySelectorAll('main img').length;"), 0);
}
