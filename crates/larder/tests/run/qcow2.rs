//! A Debian guest whose root file system is a qcow2 image over another one.

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::process::{Command, Output};

use crate::guest::{Guest, Place, built};
use crate::sha256;

/// Guest script: at the first boot typical work, then a reset without unmounting; at the second boot it verifies the
/// data, trims free space, and powers off.
const WORK: &str = r#"
set -eu
work=/var/lib/guest-work

database() {
  python3 - "$1" <<'END'
import hashlib, sqlite3, sys
made = sqlite3.connect('/var/lib/guest-work/database')
if sys.argv[1] == 'make':
    made.execute('PRAGMA journal_mode = WAL')
    made.execute('PRAGMA synchronous = FULL')
    made.execute('CREATE TABLE entries (id INTEGER PRIMARY KEY, digest TEXT)')
    for batch in range(20):
        rows = [(hashlib.sha256(b'%d' % (batch * 100 + row)).hexdigest(),) for row in range(100)]
        made.executemany('INSERT INTO entries (digest) VALUES (?)', rows)
        made.commit()
    made.execute('DELETE FROM entries WHERE id % 7 = 0')
    made.commit()
assert made.execute('PRAGMA integrity_check').fetchall() == [('ok',)]
digests = made.execute('SELECT id, digest FROM entries ORDER BY id').fetchall()
assert digests == [(id, hashlib.sha256(b'%d' % (id - 1)).hexdigest()) for id in range(1, 2001) if id % 7]
END
}

if [ ! -e $work/done ]; then
  mkdir -p $work/package/DEBIAN $work/package/opt/work
  cp -r /usr/lib/python3.*/encodings /usr/lib/python3.*/email $work/package/opt/work
  printf 'Package: work\nVersion: 1\nArchitecture: all\nMaintainer: nobody\nDescription: work\n' \
    >$work/package/DEBIAN/control
  dpkg-deb --build $work/package $work/work.deb >/dev/null
  dpkg --install $work/work.deb >/dev/null
  rm -r $work/package
  tar -cf $work/programs.tar /usr/bin
  database make
  find $work /opt/work -type f ! -name 'database*' -print0 | xargs -0 sha256sum >/var/lib/sums
  head -c 64M /dev/urandom >/var/lib/ballast
  touch $work/done
  sync
  echo WORKED
  read -r line
  systemctl reboot --force --force
  sleep 1000
fi

sha256sum --quiet -c /var/lib/sums
dpkg --verify work
dpkg --purge work >/dev/null
database verify
rm /var/lib/ballast
sync
echo "TRIMMED $(fstrim -v /)"
# The header of a qcow2 image that has this guest's choice of a backing file.
printf 'QFI\373\0\0\0\003' | dd of=/dev/vdb bs=512 conv=sync,fsync 2>/dev/null && echo "IT IS WRITTEN"
printf 'anything else' | dd of=/dev/vdb bs=512 conv=sync,fsync 2>/dev/null
dmesg | grep 'I/O error' | grep -v vdb && exit 2
exit 0
"#;

fn qemu_img(arguments: &[&str], image: &Path) -> Output {
    let output = Command::new("qemu-img").args(arguments).arg(image).output();
    output.expect("qemu-img is there")
}

/// A guest's flushed work on an overlay survives a reset, the overlay is sound, and the backing file is unchanged.
#[test]
fn debian_on_overlay_survives_reset() {
    let place = Place::new("overlay");
    let base = place.path("base.qcow2");
    let system = built("debian12.ext4");
    let system = system.to_str().expect("is text");
    let made = qemu_img(&["convert", "-f", "raw", "-O", "qcow2", system], &base);
    assert!(made.status.success(), "{made:?}");
    let overlay = place.path("overlay.qcow2");
    let made = qemu_img(&["create", "-f", "qcow2", "-F", "qcow2", "-b", "base.qcow2"], &overlay);
    assert!(made.status.success(), "{made:?}");
    let guessed = place.image("guessed.raw", 8);
    let base_before = sha256(&base);

    let root = format!("file={},if=virtio,format=qcow2,discard=unmap,l2-cache-size=1M", overlay.display());
    let second = format!("file={},if=virtio", guessed.display());
    let drives = ["-drive", &root, "-drive", &second, "-action", "reboot=reset"];
    let mut guest = Guest::boot_debian(&place, &drives, WORK);
    let told = guest.line(&format!("larder: disk {}: served over vhost-user-blk as vda", overlay.display()));
    assert!(told.contains("ignored, because Larder does not need them: l2-cache-size"), "{told}");
    guest.line("WORKED");
    let used = fs::metadata(&overlay).expect("is there").blocks() * 512;
    for (arguments, image) in [
        (&["info"][..], &overlay),
        (&["check"], &overlay),
        (&["resize", "-q"], &overlay),
        (&["commit"], &overlay),
        (&["resize", "-q"], &base),
    ] {
        let mut command = Command::new("qemu-img");
        command.args(arguments).arg(image);
        if arguments[0] == "resize" {
            command.arg("3G");
        }
        let refused = command.output().expect("qemu-img is there");
        let said = String::from_utf8_lossy(&refused.stderr).into_owned();
        assert!(!refused.status.success() && said.contains("lock"), "{arguments:?}: {refused:?}");
    }
    guest.type_line("go on");

    let trimmed = guest.line("TRIMMED ");
    assert_eq!(guest.line("LARDER-GUEST-EXIT"), "LARDER-GUEST-EXIT 0", "{trimmed}");
    let (code, output) = guest.end();
    assert_eq!(code, 0, "{output}");
    assert!(!output.contains("IT IS WRITTEN"), "{output}");
    let refused = format!("{}: a write that would give the disk the header of a qcow2 image", guessed.display());
    assert_eq!(output.matches(&refused).count(), 1, "{output}");
    assert!(place.leftovers().is_empty(), "{:?}", place.leftovers());

    let check = qemu_img(&["check", "-f", "qcow2"], &overlay);
    assert_eq!(check.status.code(), Some(0), "{check:?}");
    let kept = fs::metadata(&overlay).expect("is there").blocks() * 512;
    assert!(kept + (56 << 20) < used, "{used} bytes became {kept}: {trimmed}");
    assert_eq!(sha256(&base), base_before);
    let first = fs::read(&guessed).expect("is there");
    assert!(first.starts_with(b"anything else\0"));
    let copy = place.path("copy.raw");
    let made = qemu_img(&["convert", "-f", "qcow2", "-O", "raw", overlay.to_str().expect("is text")], &copy);
    assert!(made.status.success(), "{made:?}");
    let check = Command::new("e2fsck").args(["-f", "-n"]).arg(&copy).output();
    let check = check.expect("e2fsck is there");
    assert_eq!(check.status.code(), Some(0), "{check:?}");
}
