//! The files that an image's header names. A service opens those that its VM's file names, and no others. A command
//! line follows the header, as far as the caller's rights go, and can record the chain.

mod support;

use std::ffi::OsStr;
use std::fs;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::process::Command;

use larder_bench::campaign::front_end::{FrontEnd, Options};
use larder_bench::campaign::process::Process;

use support::{
    TEST_TIMEOUT, assert_io_works, disk_serve_command, larder_path, require_root, run_command, run_tool, start_server,
    temp_dir_on_disk, temp_dir_on_tmpfs,
};
use tempfile::TempDir;

fn text(path: &Path) -> &str {
    path.to_str().expect("UTF-8")
}

struct Place {
    images: TempDir,
    sockets: TempDir,
}

impl Place {
    fn new() -> Self {
        Self { images: temp_dir_on_disk(), sockets: temp_dir_on_tmpfs() }
    }

    fn image(&self, name: &str) -> PathBuf {
        self.images.path().join(name)
    }

    /// Creates a raw image of 1 MiB that is full of `byte`.
    fn raw(&self, name: &str, byte: u8) -> PathBuf {
        let path = self.image(name);
        fs::write(&path, vec![byte; 1 << 20]).expect("room");
        path
    }

    /// Creates a qcow2 image of 1 MiB whose header names `backing`, which need not exist.
    fn overlay(&self, name: &str, backing: &str, format: &str) -> PathBuf {
        let path = self.image(name);
        let options = ["create", "-q", "-u", "-f", "qcow2", "-b", backing, "-F", format, text(&path), "1M"];
        run_tool("qemu-img", &options);
        path
    }

    /// Creates a qcow2 image of 1 MiB with an external data file.
    fn with_data_file(&self, name: &str, data_file: &Path) -> PathBuf {
        let path = self.image(name);
        let option = format!("data_file={}", text(data_file));
        run_tool("qemu-img", &["create", "-q", "-f", "qcow2", "-o", &option, text(&path), "1M"]);
        path
    }

    /// Returns a `larder vm` command for a VM with one disk, which `lines` configure apart from its sockets.
    fn vm(&self, lines: &str) -> Command {
        let file = self.sockets.path().join("web.toml");
        let all = format!("control = \"control\"\n[[disk]]\nsocket = \"vda\"\n{lines}\n");
        fs::write(&file, all).expect("room");
        let mut command = Command::new(larder_path());
        command.arg("vm").arg(file);
        command
    }
}

/// Asserts that the command fails with an error that contains all of `words`; returns the output.
fn refused(command: Command, words: &[&str]) -> String {
    let (code, said) = run_command(command);
    assert_eq!(code, Some(2), "{said}");
    for word in words {
        assert!(said.contains(word), "no '{word}' in: {said}");
    }
    said
}

/// Asserts that the command serves; stops it, and returns its output.
fn serves(command: Command) -> String {
    let mut process = Process::start(command).expect("starts");
    process.wait_for("serving", TEST_TIMEOUT).expect("serves");
    process.signal(libc::SIGTERM);
    process.wait(TEST_TIMEOUT).expect("ends");
    process.output()
}

/// Whatever a header names, a service opens only files that its VM's file names, and reports the line that would
/// allow more.
#[test]
fn service_opens_only_configured_files() {
    let place = Place::new();
    let secret = place.raw("secret", 7);
    let server = place.sockets.path().join("nbd");
    let listener = UnixListener::bind(&server).expect("binds");
    listener.set_nonblocking(true).expect("is set");
    let uri = format!("nbd+unix:///x?socket={}", text(&server));
    let by_file = place.overlay("file.qcow2", text(&secret), "raw");
    let by_uri = place.overlay("uri.qcow2", &uri, "raw");
    let by_device = place.overlay("device.qcow2", "/dev/zero", "raw");
    let by_link = place.overlay("link.qcow2", "/proc/self/fd/0", "raw");
    let data = place.image("data");
    let by_data = place.with_data_file("with-data.qcow2", &data);
    for (image, named) in
        [(&by_file, text(&secret)), (&by_uri, &uri), (&by_device, "/dev/zero"), (&by_link, "/proc/self/fd/0")]
    {
        let lines = format!("image = \"{}\"\nformat = \"qcow2\"", text(image));
        let line = format!("backing = [{{ image = \"{named}\", format = \"raw\" }}]");
        refused(place.vm(&lines), &["its header names the backing file", "the VM's file does not name", &line]);
    }
    let lines = format!("image = \"{}\"\nformat = \"qcow2\"", text(&by_data));
    let line = format!("data-file = \"{}\"", text(&data));
    refused(place.vm(&lines), &["its header names the external data file", &line]);
    assert!(listener.accept().is_err(), "nobody connected");
    serves(place.vm(&format!("{lines}\n{line}")));
    let line = format!("backing = [{{ image = \"{}\", format = \"raw\" }}]", text(&secret));
    let lines = format!("image = \"{}\"\nformat = \"qcow2\"\n{line}", text(&by_file));
    serves(place.vm(&lines));
    // A line for a backing file that the header does not name.
    run_tool("qemu-img", &["rebase", "-u", "-b", "", text(&by_file)]);
    refused(place.vm(&lines), &["its header names no backing file, but the VM's file names"]);
    // Special files are refused even if the VM's file names them.
    let lines = format!(
        "image = \"{}\"\nformat = \"qcow2\"\nbacking = [{{ image = \"/dev/zero\", format = \"raw\" }}]",
        text(&by_device)
    );
    refused(place.vm(&lines), &["/dev/zero is a character device"]);
}

/// The VM's file must give the format of the image and of its backing file.
#[test]
fn service_never_guesses_a_format() {
    let place = Place::new();
    let base = place.raw("base.raw", 7);
    refused(
        place.vm(&format!("image = \"{}\"", text(&base))),
        &["the VM's file does not give its format", "add format = \"raw\""],
    );
    let image = place.overlay("top.qcow2", text(&base), "raw");
    let line = |format: &str| {
        format!(
            "image = \"{}\"\nformat = \"qcow2\"\nbacking = [{{ image = \"{}\", format = \"{format}\" }}]",
            text(&image),
            text(&base)
        )
    };
    refused(place.vm(&line("qcow2")), &["gives the backing file", "the format raw, but the VM's file gives qcow2"]);
    serves(place.vm(&line("raw")));
}

/// `--check` prints the lines that allow a whole chain in the VM's file.
#[test]
fn check_prints_lines_for_chain() {
    let place = Place::new();
    let base = place.raw("base.raw", 7);
    let middle = place.overlay("middle.qcow2", text(&base), "raw");
    let top = place.overlay("top.qcow2", "middle.qcow2", "qcow2");
    let lines = format!("image = \"{}\"\nformat = \"qcow2\"", text(&top));
    let mut check = place.vm(&lines);
    check.arg("--check");
    let line = format!(
        "backing = [{{ image = \"{}\", format = \"qcow2\" }}, {{ image = \"{}\", format = \"raw\" }}]",
        text(&middle),
        text(&base)
    );
    refused(check, &[&line]);
    let all = format!("{lines}\n{line}");
    let mut check = place.vm(&all);
    check.arg("--check");
    let (code, said) = run_command(check);
    assert_eq!(code, Some(0), "{said}");
    serves(place.vm(&all));
}

/// `--pin` adds the lines that a file of an earlier version lacks, and nothing else.
#[test]
fn pin_adds_missing_lines() {
    let place = Place::new();
    let base = place.raw("base.raw", 7);
    let image = place.overlay("top.qcow2", "base.raw", "raw");
    let lines = format!("image = \"{}\" # the image\nserial = \"1\"", text(&image));
    let pin = || {
        let mut pin = place.vm(&lines);
        pin.arg("--pin");
        pin
    };
    let (code, said) = run_command(pin());
    let added = format!("format = \"qcow2\"\nbacking = [{{ image = \"{}\", format = \"raw\" }}]", text(&base));
    assert_eq!(code, Some(0), "{said}");
    assert!(added.lines().all(|line| said.contains(line)), "{said}");
    let file = place.sockets.path().join("web.toml");
    let now = fs::read_to_string(&file).expect("is there");
    assert!(now.ends_with(&format!("\"{}\" # the image\n{added}\nserial = \"1\"\n", text(&image))), "{now}");
    let again = || {
        let mut command = Command::new(larder_path());
        command.arg("vm").arg(&file);
        command
    };
    serves(again());
    let mut pin_again = again();
    pin_again.arg("--pin");
    let (code, said) = run_command(pin_again);
    assert!(code == Some(0) && said.contains("there is nothing to add"), "{said}");
    assert_eq!(fs::read_to_string(&file).expect("is there"), now);
    // A format that no header names has to be added by the user.
    run_tool("qemu-img", &["create", "-q", "-f", "qcow2", "-u", "-b", text(&base), "-F", "raw", text(&image), "1M"]);
    without_backing_format(&image);
    refused(pin(), &["no header gives the format", "format = \"?\""]);
}

/// Removes the format of the backing file from a qcow2 image's header, by changing the type of its extension.
fn without_backing_format(image: &Path) {
    let mut bytes = fs::read(image).expect("is read");
    let at = bytes
        .windows(4)
        .position(|word| word == 0xe279_2aca_u32.to_be_bytes())
        .expect("the extension of the backing format");
    // An unknown type, which readers skip.
    bytes[at..at + 4].copy_from_slice(&0x1234_5678_u32.to_be_bytes());
    fs::write(image, bytes).expect("is written");
}

/// A service does not guess the format of a backing file that no header names, and its messages do not invent one.
#[test]
fn service_never_guesses_backing_format() {
    let place = Place::new();
    let base = place.raw("base.raw", 7);
    let image = place.overlay("top.qcow2", text(&base), "raw");
    without_backing_format(&image);
    let lines = format!("image = \"{}\"\nformat = \"qcow2\"", text(&image));
    refused(place.vm(&lines), &["format = \"?\"", "raw or qcow2 in place of the question mark"]);
    let line = format!("backing = [{{ image = \"{}\", format = \"raw\" }}]", text(&base));
    serves(place.vm(&format!("{lines}\n{line}")));
}

/// Lines about other files are refused for a raw image.
#[test]
fn raw_image_has_no_other_files() {
    let place = Place::new();
    let base = place.raw("base.raw", 7);
    let lines = format!("image = \"{}\"\nformat = \"raw\"", text(&base));
    refused(place.vm(&format!("{lines}\ndata-file = \"/x\"")), &["a raw image refers to no other file"]);
    let backing = "backing = [{ image = \"/x\", format = \"raw\" }, { image = \"/y\", format = \"raw\" }]";
    refused(
        place.vm(&format!("{}\n{backing}", lines.replace("\"raw\"", "\"qcow2\""))),
        &["/x is raw, and a raw image refers to no other file"],
    );
}

/// `--check`, and the lines that it prints, open files of this host only, and make no connections.
#[test]
fn check_makes_no_connections() {
    let place = Place::new();
    let server = place.sockets.path().join("nbd");
    let listener = UnixListener::bind(&server).expect("binds");
    listener.set_nonblocking(true).expect("is set");
    let uri = format!("nbd+unix:///x?socket={}", text(&server));
    let image = place.overlay("top.qcow2", &uri, "qcow2");
    let lines = format!("image = \"{}\"\nformat = \"qcow2\"", text(&image));
    let line = format!("backing = [{{ image = \"{uri}\", format = \"qcow2\" }}]");
    let mut check = place.vm(&lines);
    check.arg("--check");
    refused(check, &[&line]);
    let mut check = place.vm(&format!("{lines}\n{line}"));
    check.arg("--check");
    let (code, said) = run_command(check);
    assert!(code == Some(0) && said.contains("NBD servers are not contacted"), "{said}");
    assert!(listener.accept().is_err(), "nobody connected");
}

/// A command line follows the headers and reports the chain; or refuses it; or holds it to the recorded one.
#[test]
fn command_line_follows_and_pins_chains() {
    let place = Place::new();
    let (base, other) = (place.raw("base.raw", 7), place.raw("other.raw", 9));
    let image = place.overlay("top.qcow2", "base.raw", "raw");
    let pin = place.image("top.chain");
    let socket = place.sockets.path().join("socket");
    let command = |options: &[&str]| {
        let mut all = vec![text(&image), "--socket", text(&socket)];
        all.extend(options);
        disk_serve_command(&all)
    };
    let said = serves(command(&[]));
    assert!(said.contains(&format!("backing file {}, raw, read", text(&base))), "{said}");
    refused(command(&["--backing-chain", "none"]), &["'base.raw'", "--backing-chain none does not allow"]);
    serves(command(&["--pin-chain", text(&pin)]));
    let written = fs::read_to_string(&pin).expect("is written");
    assert!(written.contains(&format!("backing = [{{ image = \"{}\"", text(&base))), "{written}");
    serves(command(&["--pin-chain", text(&pin)]));
    run_tool("qemu-img", &["rebase", "-u", "-b", text(&other), "-F", "raw", text(&image)]);
    // The advice names the file that may be removed.
    let advice = format!("remove {}, which the next start creates again", text(&pin));
    refused(command(&["--pin-chain", text(&pin)]), &[text(&other), text(&pin), "does not name", &advice]);
    refused(
        disk_serve_command(&[text(&base), "--socket", text(&socket), "--pin-chain", text(&pin)]),
        &["it belongs to", text(&image)],
    );
    // The file of the chain is writable by others, or is invalid.
    fs::set_permissions(&pin, fs::Permissions::from_mode(0o666)).expect("is ours");
    refused(command(&["--pin-chain", text(&pin)]), &["other users may write to it"]);
    let link = place.image("link.chain");
    std::os::unix::fs::symlink(&pin, &link).expect("links");
    refused(command(&["--pin-chain", text(&link)]), &["--pin-chain", text(&link), "it is a symbolic link"]);
    refused(command(&["--pin-chain", text(place.images.path())]), &["--pin-chain", "not a regular file"]);
    refused(command(&["--pin-chain", text(&place.image("none/there"))]), &["--pin-chain", "No such file"]);
    assert!(!socket.exists(), "nothing was served");
    drop(start_server(&image, place.sockets.path(), &[]));
    let mut relative = command(&["--pin-chain", "relative.chain"]);
    relative.current_dir(place.images.path());
    serves(relative);
    assert!(place.image("relative.chain").exists());
}

/// A path that no TOML file can hold is not recorded as another one: the first start with `--pin-chain` is refused, and
/// `--pin` and `--check` print no line with it.
#[test]
fn chain_outside_utf8_is_refused() {
    let place = Place::new();
    let folder = place.images.path().join(OsStr::from_bytes(b"nu\xff"));
    fs::create_dir(&folder).expect("room");
    let image = folder.join("top.qcow2");
    fs::rename(place.overlay("top.qcow2", "base.raw", "raw"), &image).expect("moves");
    fs::rename(place.raw("base.raw", 7), folder.join("base.raw")).expect("moves");
    let (pin, socket) = (place.image("top.chain"), place.sockets.path().join("socket"));
    let mut serve = disk_serve_command(&["top.qcow2", "--socket", text(&socket), "--pin-chain", text(&pin)]);
    serve.current_dir(&folder);
    refused(serve, &["--pin-chain", "is not UTF-8", "rename the file, or the directory"]);
    assert!(!pin.exists(), "nothing is recorded");
    let file = folder.join("web.toml");
    let lines = "control = \"control\"\n[[disk]]\nsocket = \"vda\"\nimage = \"top.qcow2\"\nformat = \"qcow2\"\n";
    fs::write(&file, lines).expect("room");
    for option in ["--pin", "--check"] {
        let mut command = Command::new(larder_path());
        command.args(["vm", "./web.toml", option]).current_dir(&folder);
        let said = refused(command, &["is not UTF-8"]);
        assert!(!said.contains("backing = ["), "{said}");
    }
    assert_eq!(fs::read_to_string(&file).expect("is there"), lines);
}

/// The author of an image can neither control the terminal nor forge a line by the names in its header.
#[test]
fn header_names_are_escaped() {
    let place = Place::new();
    let named = "rbd:\u{1b}[31mX\rY\nlarder: web: 1 disk can be served\u{202e}Z";
    let escaped = r"rbd:\u001b[31mX\u000dY\u000alarder: web: 1 disk can be served\u202eZ";
    let image = place.overlay("top.qcow2", named, "raw");
    let no_control = |said: &str| {
        let forged = said.lines().any(|line| line.starts_with("larder: web: 1 disk can"));
        assert!(!said.contains(['\u{1b}', '\r', '\u{202e}']) && !forged, "{said:?}");
    };
    let lines = format!("image = \"{}\"\nformat = \"qcow2\"", text(&image));
    let mut check = place.vm(&lines);
    check.arg("--check");
    no_control(&refused(check, &[escaped]));
    no_control(&refused(place.vm(&lines), &[escaped]));
    let mut pin = place.vm(&format!("image = \"{}\"", text(&image)));
    pin.arg("--pin");
    no_control(&refused(pin, &[escaped]));
    let mut dry_run = Command::new(larder_path());
    let drive = format!("if=virtio,format=qcow2,file={}", text(&image));
    dry_run.args(["run", "--dry-run", "--", "qemu-system-x86_64", "-drive", &drive]);
    let (_, said) = run_command(dry_run);
    assert!(said.contains(escaped), "{said}");
    no_control(&said);
    // A format that no driver has.
    let image = place.overlay("format.qcow2", "base.raw", "raw");
    let mut bytes = fs::read(&image).expect("is read");
    let at = bytes
        .windows(4)
        .position(|word| word == 0xe279_2aca_u32.to_be_bytes())
        .expect("the extension of the backing format");
    bytes[at + 8..at + 11].copy_from_slice(b"\x1b[m");
    fs::write(&image, bytes).expect("is written");
    let mut check = place.vm(&format!("image = \"{}\"\nformat = \"qcow2\"", text(&image)));
    check.arg("--check");
    no_control(&refused(check, &[r"the format '\u001b[m'"]));
}

/// The line that a refusal advises is right in the pin file, wherever the caller's working directory is.
#[test]
fn pin_advice_has_absolute_paths() {
    let place = Place::new();
    let (base, other) = (place.raw("base.raw", 7), place.raw("other.raw", 9));
    let image = place.overlay("top.qcow2", "base.raw", "raw");
    let pins = place.sockets.path().join("pins");
    fs::create_dir(&pins).expect("room");
    let (pin, socket) = (pins.join("top.chain"), place.sockets.path().join("socket"));
    let command = || {
        let mut serve = disk_serve_command(&["top.qcow2", "--socket", text(&socket), "--pin-chain", text(&pin)]);
        serve.current_dir(place.images.path());
        serve
    };
    serves(command());
    run_tool("qemu-img", &["rebase", "-u", "-b", "other.raw", "-F", "raw", text(&image)]);
    let line = format!("backing = [{{ image = \"{}\", format = \"raw\" }}]", text(&other));
    refused(command(), &[&line]);
    let before = fs::read_to_string(&pin).expect("is written");
    fs::write(&pin, before.replace(text(&base), text(&other))).expect("is ours");
    serves(command());
}

/// A name with its driver is relative to the working directory, as in QEMU. A command line follows it there; a VM's
/// file cannot allow it, and one line says so.
#[test]
fn vm_file_refuses_working_directory_names() {
    let place = Place::new();
    place.raw("base.raw", 7);
    let image = place.overlay("top.qcow2", "file:base.raw", "raw");
    let socket = place.sockets.path().join("socket");
    let mut serve = disk_serve_command(&[text(&image), "--socket", text(&socket)]);
    serve.current_dir(place.images.path());
    serves(serve);
    let lines = format!("image = \"{}\"\nformat = \"qcow2\"", text(&image));
    for option in [None, Some("--check"), Some("--pin")] {
        let mut command = place.vm(&lines);
        command.args(option).current_dir(place.images.path());
        let said = refused(command, &["'file:base.raw' names its driver", "qemu-img rebase -u"]);
        assert!(!said.contains("backing = ["), "{option:?}: {said}");
    }
    run_tool("qemu-img", &["rebase", "-u", "-F", "raw", "-b", text(&place.image("base.raw")), text(&image)]);
    let mut pin = place.vm(&lines);
    pin.arg("--pin");
    let (code, said) = run_command(pin);
    assert_eq!(code, Some(0), "{said}");
}

/// A refusal advises nothing that the next start would refuse as well.
#[test]
fn refusal_has_no_useless_advice() {
    require_root("link of another user");
    let place = Place::new();
    let base = place.raw("base.raw", 7);
    let lines = format!("image = \"{}\"\nformat = \"qcow2\"", text(&base));
    for option in [None, Some("--check")] {
        let mut command = place.vm(&lines);
        command.args(option);
        let said = refused(command, &["correct the format in the VM's file"]);
        assert!(!said.contains("without format="), "{said}");
    }
    let link = place.image("link.raw");
    std::os::unix::fs::symlink(&base, &link).expect("links");
    std::os::unix::fs::lchown(&link, Some(1234), None).expect("we are root");
    let mut confined = place.vm(&format!("image = \"{}\"\nformat = \"raw\"", text(&link)));
    confined.arg("--confine");
    let said = refused(confined, &["belongs to user 1234"]);
    let useless = said.contains("readonly = true") || said.contains("needs read");
    assert!(!useless, "{said}");
}

/// `--pin` adds no line for a file that a disk cannot have.
#[test]
fn pin_refuses_impossible_files() {
    let place = Place::new();
    fs::create_dir(place.image("folder")).expect("room");
    for (name, words) in [("none.raw", "No such file"), ("folder", "neither a regular file nor")] {
        let image = place.overlay("top.qcow2", name, "raw");
        let mut pin = place.vm(&format!("image = \"{}\"\nformat = \"qcow2\"", text(&image)));
        pin.arg("--pin");
        refused(pin, &[text(&place.image(name)), words]);
    }
}

/// `--pin` reports a chain without an end as such.
#[test]
fn pin_reports_loop_of_chain() {
    let place = Place::new();
    let one = place.overlay("one.qcow2", "two.qcow2", "qcow2");
    place.overlay("two.qcow2", "one.qcow2", "qcow2");
    let mut pin = place.vm(&format!("image = \"{}\"\nformat = \"qcow2\"", text(&one)));
    pin.arg("--pin");
    refused(pin, &["'one.qcow2' leads back to an image of the same chain"]);
}

/// Root opens the files that another user's image names only with `--trust-image`.
#[test]
fn root_distrusts_other_users_image() {
    require_root("image of another user");
    let place = Place::new();
    let base = place.raw("base.raw", 7);
    let image = place.overlay("top.qcow2", text(&base), "raw");
    std::os::unix::fs::chown(&image, Some(65534), None).expect("we are root");
    let socket = place.sockets.path().join("socket");
    let mut all = vec![text(&image), "--socket", text(&socket)];
    refused(disk_serve_command(&all), &["it belongs to user nobody", text(&base), "--trust-image"]);
    all.push("--trust-image");
    serves(disk_serve_command(&all));

    let disk = |arguments: &[&str]| {
        let mut command = Command::new(larder_path());
        command.arg("disk").args(arguments);
        command
    };
    refused(disk(&["resize", text(&image), "2M"]), &["it belongs to user nobody", "--trust-image"]);
    let (code, said) = run_command(disk(&["resize", text(&image), "2M", "--trust-image"]));
    assert_eq!(code, Some(0), "{said}");
    let (code, said) = run_command(disk(&["check", text(&image)]));
    assert!(code == Some(0) && said.contains("not inspected"), "{said}");
    let (_, said) = run_command(disk(&["check", text(&image), "--trust-image"]));
    assert!(!said.contains("not inspected"), "{said}");

    // The same holds if anybody could have written the header.
    std::os::unix::fs::chown(&image, Some(0), None).expect("we are root");
    fs::set_permissions(&image, fs::Permissions::from_mode(0o666)).expect("is ours");
    all.pop();
    refused(disk_serve_command(&all), &["any user may write to it", "--trust-image"]);
}

/// Root follows the names in its own images through no link of another user, wherever that user has put the image. It
/// does not trust an image that a group may write to.
#[test]
fn root_follows_no_foreign_link() {
    require_root("links of another user");
    let place = Place::new();
    let secret = place.raw("secret", 7);
    place.raw("base.raw", 9);
    let golden = place.overlay("golden.qcow2", "base.raw", "raw");
    let folder = place.image("alice");
    fs::create_dir(&folder).expect("a folder");
    let plant = |target: &Path, name: &str| {
        std::os::unix::fs::symlink(target, folder.join(name)).expect("links");
        std::os::unix::fs::lchown(folder.join(name), Some(65534), None).expect("we are root");
    };
    let data = folder.join("data");
    let with_data = place.with_data_file("data.qcow2", &data);
    fs::remove_file(&data).expect("is there");
    plant(&secret, "data");
    plant(&secret, "base.raw");
    plant(&golden, "linked.qcow2");
    fs::hard_link(&golden, folder.join("hard.qcow2")).expect("links");
    std::os::unix::fs::chown(&folder, Some(65534), None).expect("we are root");
    let socket = place.sockets.path().join("socket");
    let command = |image: &Path, options: &[&str]| {
        let mut all = vec![text(image), "--socket", text(&socket)];
        all.extend(options);
        disk_serve_command(&all)
    };
    serves(command(&golden, &[]));
    let by_alice = [folder.join("linked.qcow2"), folder.join("hard.qcow2"), with_data.clone()];
    for image in &by_alice {
        refused(command(image, &[]), &["on the way belongs to user 65534", "--trust-image"]);
        serves(command(image, &["--trust-image"]));
    }
    // Links of root are followed.
    for name in ["data", "base.raw"] {
        std::os::unix::fs::lchown(folder.join(name), Some(0), None).expect("we are root");
    }
    for image in &by_alice {
        serves(command(image, &[]));
    }

    std::os::unix::fs::chown(&golden, None, Some(65534)).expect("we are root");
    fs::set_permissions(&golden, fs::Permissions::from_mode(0o664)).expect("is ours");
    refused(command(&golden, &[]), &["users of group", "may write to it", "--trust-image"]);
}

/// `disk info` and `disk check` as root open no backing file that another user or a server has chosen, whichever image
/// of the chain names it.
#[test]
fn root_inspects_no_foreign_choice() {
    require_root("images of another user");
    let place = Place::new();
    let secret = place.raw("secret", 7);
    let theirs = place.overlay("theirs.qcow2", text(&secret), "raw");
    std::os::unix::fs::chown(&theirs, Some(65534), None).expect("we are root");
    let over_theirs = place.overlay("over.qcow2", "theirs.qcow2", "qcow2");
    let link = place.image("link");
    std::os::unix::fs::symlink(&secret, &link).expect("links");
    std::os::unix::fs::lchown(&link, Some(65534), None).expect("we are root");
    let over_link = place.overlay("linked.qcow2", text(&link), "raw");
    let uri = format!("nbd+unix:///?socket={}", text(&place.sockets.path().join("nbd")));
    let served = place.overlay("served.qcow2", text(&secret), "raw");
    let _server = start_server(&served, place.sockets.path(), &["--format", "raw", "--nbd", &uri]);
    for (image, depth, why) in [
        (text(&theirs), 1, "it belongs to user nobody"),
        (text(&over_theirs), 2, "it belongs to user nobody"),
        (text(&over_link), 1, "on the way belongs to user 65534"),
        (&uri, 1, "it comes from an NBD server"),
    ] {
        let disk = |what: &[&str], more: &[&str]| {
            let mut command = Command::new(larder_path());
            command.arg("disk").args(what).args(["--format", "qcow2", image]).args(more);
            run_command(command)
        };
        let info = |more: &[&str]| disk(&["info", "--backing-chain"], more);
        let (code, said) = info(&[]);
        assert_eq!(code, Some(0), "{said}");
        for words in [&format!("{depth} deep"), "cannot be read: ", why, "--trust-image"] {
            assert!(said.contains(words), "no '{words}' in: {said}");
        }
        let (code, said) = info(&["--trust-image"]);
        assert!(code == Some(0) && said.contains("(raw): 1 MiB"), "{said}");
        let (code, said) = disk(&["check"], &[]);
        assert!(code == Some(0) && said.contains("is not inspected"), "{said}");
        assert!(said.contains(why), "{said}");
        let (code, said) = disk(&["check"], &["--trust-image"]);
        assert!(code == Some(0) && !said.contains("not inspected"), "{said}");
    }
}

/// Another user's cache names the image to which root would write, so root has to name the same image.
#[test]
fn foreign_cache_flush_needs_confirmation() {
    require_root("cache of another user");
    let place = Place::new();
    let image = place.raw("disk.raw", 7);
    let cache = place.image("disk.cache");
    let options = ["--cache", text(&cache), "--cache-size", "16MiB", "--cache-mode", "wb"];
    let server = start_server(&image, place.sockets.path(), &options);
    let mut guest = FrontEnd::connect(&server.socket, Options::default()).expect("connects");
    assert_io_works(&mut guest, 1);
    // Dropping the server kills it.
    drop(server);
    std::os::unix::fs::chown(&cache, Some(65534), None).expect("we are root");
    let flush = |options: &[&str]| {
        let mut command = Command::new(larder_path());
        command.args(["disk", "cache", "flush", text(&cache)]).args(options);
        command
    };
    let advice = format!("--image {} --format raw", text(&image));
    refused(flush(&[]), &["it belongs to user nobody", &advice]);
    refused(flush(&["--image", text(&image), "--format", "qcow2"]), &["it is the cache of a raw disk"]);
    let (code, said) = run_command(flush(&["--image", text(&image), "--format", "raw"]));
    assert_eq!(code, Some(0), "{said}");
}

/// `disk info` reads an image's own header, and makes no connections.
#[test]
fn disk_info_opens_the_image_alone() {
    let place = Place::new();
    let server = place.sockets.path().join("nbd");
    let listener = UnixListener::bind(&server).expect("binds");
    listener.set_nonblocking(true).expect("is set");
    let uri = format!("nbd+unix:///x?socket={}", text(&server));
    let image = place.overlay("top.qcow2", &uri, "raw");
    let said = run_tool(text(larder_path()), &["disk", "info", text(&image)]);
    assert!(said.contains(&uri) && !said.contains("backing chain"), "{said}");
    assert!(listener.accept().is_err(), "nobody connected");
    let base = place.raw("base.raw", 7);
    run_tool("qemu-img", &["rebase", "-u", "-b", text(&base), "-F", "raw", text(&image)]);
    let said = run_tool(text(larder_path()), &["disk", "info", text(&image), "--backing-chain"]);
    assert!(said.contains("1 deep"), "{said}");
}
