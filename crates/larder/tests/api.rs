//! The control socket against its OpenAPI document, by schemathesis: requests of all kinds that the document allows,
//! and many that it does not.

mod support;

use std::net::TcpListener;
use std::path::Path;
use std::process::Command;

use larder_bench::campaign::process::{Process, killed_with_parent};
use serde_json::Value;
use support::{TEST_TIMEOUT, larder_path, run_command, run_tool, temp_dir_on_disk, temp_dir_on_tmpfs};

/// Number of requests of each kind and phase.
const EXAMPLES: &str = "60";

#[test]
fn control_socket_matches_openapi_document() {
    let (images, folder) = (temp_dir_on_disk(), temp_dir_on_tmpfs());
    let path = |name: &str| folder.path().join(name);
    let text = |path: &Path| path.to_str().expect("UTF-8").to_owned();
    let image = images.path().join("disk.qcow2");
    run_tool("qemu-img", &["create", "-q", "-f", "qcow2", &text(&image), "64M"]);
    let file = format!(
        "control = \"control\"\n[[disk]]\nimage = \"{0}\"\nformat = \"qcow2\"\nsocket = \"vda\"\nnbd = \"nbd+unix:///?socket=nbd\"\ncache = \
         \"{0}.cache\"\ncache-size = \"32MiB\"\n[[disk]]\nimage = \"{0}.raw\"\nformat = \"raw\"\nsocket = \"vdb\"\n",
        text(&image)
    );
    std::fs::write(path("web.toml"), file).expect("writes the file");
    let raw = std::fs::File::create(images.path().join("disk.qcow2.raw"));
    raw.and_then(|raw| raw.set_len(8 << 20)).expect("an image");
    let mut command = Command::new(larder_path());
    // Confined, so that generated requests cannot create caches anywhere.
    command.args(["vm", "--confine"]).arg(path("web.toml"));
    let mut server = Process::start(command).expect("larder starts");
    server.wait_for(" ready ", TEST_TIMEOUT).expect("it serves");
    let nbd = format!("nbd+unix:///?socket={}", text(&path("nbd")));
    let io = |commands: &[&str]| {
        let commands = commands.iter().flat_map(|command| ["-c", command]);
        let all: Vec<&str> = ["-f", "raw"].into_iter().chain(commands).chain([nbd.as_str()]).collect();
        run_tool("qemu-io", &all);
    };
    io(&["write -P 7 0 8M", "flush"]);

    // schemathesis supports TCP only.
    let free = TcpListener::bind("127.0.0.1:0").and_then(|port| port.local_addr());
    let port = free.expect("a port").port();
    let mut socat = killed_with_parent("socat");
    socat.args(["-d", "-d"]);
    socat.arg(format!("TCP-LISTEN:{port},bind=127.0.0.1,fork,reuseaddr"));
    socat.arg(format!("UNIX-CONNECT:{}", text(&path("control"))));
    let proxy = Process::start(socat).expect("socat starts");
    proxy.wait_for("listening on", TEST_TIMEOUT).expect("it listens");

    let wheels = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../testbed/wheels.sh");
    // pip's warnings follow the first line.
    let said = run_tool(&text(&wheels), &["api-tools"]);
    let tools = said.lines().next().expect("a folder");
    let mut schemathesis = Command::new(Path::new(tools).join("schemathesis"));
    schemathesis.current_dir(folder.path()).args(["run", "--no-color"]);
    // The stream of events does not end.
    schemathesis.args([
        "--exclude-path",
        "/v1/events",
        // The steps of a move depend on each other; after some of them there is no disk to query, or no server.
        "--exclude-path",
        "/v1/move",
        "--seed",
        "1",
        "--max-examples",
        EXAMPLES,
    ]);
    schemathesis.arg(format!("http://127.0.0.1:{port}/v1/openapi.json"));
    let (code, said) = run_command(schemathesis);
    assert_eq!(code, Some(0), "{said}\n{}", server.output());
    drop(proxy);

    // The disk is unchanged after all requests, and the server works.
    io(&["read -P 7 0 8M", "write -P 9 4M 1M", "read -P 9 4M 1M"]);
    let told = run_tool("curl", &["-sS", "--unix-socket", &text(&path("control")), "http://x/v1/disks"]);
    let told: Value = serde_json::from_str(&told).expect("JSON");
    assert_eq!(told["disks"].as_array().map(Vec::len), Some(2), "{told}");
    server.signal(libc::SIGTERM);
    let ended = server.wait(TEST_TIMEOUT).expect("it ends");
    assert!(ended.success(), "{}", server.output());
    run_tool("qemu-img", &["check", "-q", &text(&image)]);
}
