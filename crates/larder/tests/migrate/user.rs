//! A receiver that is started as root for a QEMU of another user.

use std::fs::Permissions;
use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _};
use std::process::Command;

use crate::ends::{Waiting, carries};
use crate::support::{larder_path, require_root, run_command};
use crate::tls::Authority;

/// The user ID of `nobody`, which has no supplementary group.
const USER: u32 = 65534;

#[test]
fn receiver_drops_root_and_reaches_qemu() {
    require_root("to give it up");
    let folder = crate::support::temp_dir_on_tmpfs();
    std::fs::set_permissions(folder.path(), std::os::unix::fs::PermissionsExt::from_mode(0o777)).expect("ours");
    let control = folder.path().join("control");
    let control = control.to_str().expect("UTF-8");
    let waiting = Waiting::start_as(USER, true, &["--control", control]);
    let process = waiting.receiver.process.id();
    for entry in std::fs::read_dir(format!("/proc/{process}/task")).expect("it lives").flatten() {
        let status = std::fs::read_to_string(entry.path().join("status")).expect("it lives");
        let of =
            |name: &str| status.lines().find_map(|line| line.strip_prefix(name)).unwrap_or_else(|| panic!("{name}"));
        for name in ["Uid:", "Gid:"] {
            assert_eq!(of(name).split_whitespace().collect::<Vec<_>>(), ["65534"; 4], "{status}");
        }
        assert_eq!(of("Groups:").trim(), "65534", "{status}");
        for name in ["CapPrm:", "CapEff:", "CapAmb:"] {
            assert_eq!(of(name).trim(), "0000000000000000", "{status}");
        }
    }
    let mut command = Command::new(larder_path());
    command.args(["migrate", "status", control]);
    let (code, said) = run_command(command);
    assert!(code == Some(0) && said.contains("preparing"), "{said}");
    let mut between = waiting.joined(&[]);
    carries(&mut between, 200);
    assert!(!std::fs::exists(control).expect("ours"), "its control socket is left");
}

#[test]
fn receiver_refuses_other_users_qemu() {
    require_root("to give it up");
    let mut between = Waiting::start_as(USER, false, &[]).joined(&[]);
    let _source = between.source();
    let said = between.fail();
    assert!(said[1].contains("a process of a user other than QEMU's listens there"), "{}", said[1]);
}

/// A receiver that gives up root remembers senders as its new user, in a directory that root has created for that.
#[test]
fn receiver_without_root_remembers_senders() {
    require_root("to give it up");
    let source = Authority::new();
    let destination = source.copy();
    // Like /var/lib.
    let state = destination.path().join("state");
    std::fs::create_dir(&state).expect("a folder");
    for folder in [&destination.path(), &state] {
        std::fs::set_permissions(folder, Permissions::from_mode(0o755)).expect("ours");
    }
    for _ in 0..2 {
        let waiting = Waiting::start_as(USER, true, &destination.words());
        carries(&mut waiting.joined(&source.words()), 200);
        let file = state.join("migrate/of-65534/senders");
        let found = std::fs::metadata(&file).expect("a file");
        assert_eq!((found.uid(), found.mode() & 0o777), (USER, 0o600));
        let text = std::fs::read_to_string(&file).expect("a file");
        assert!(text.ends_with(&format!("127.0.0.1 {}\n", source.key("client"))), "{text}");
        let above = std::fs::metadata(state.join("migrate")).expect("a folder");
        assert_eq!((above.uid(), above.mode() & 0o777), (0, 0o711));
    }
}
